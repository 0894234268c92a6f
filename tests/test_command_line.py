"""``python -m torch_flash_mps doctor | selftest | bench`` (BD-06, DC-03)."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from torch_flash_mps.__main__ import main
from torch_flash_mps.cli import anchors, baselines, bench, machine, selftest, timing
from torch_flash_mps.cli.baselines import NAIVE, OURS, PYTORCH
from torch_flash_mps.cli.timing import Timing

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "command_line.md").read_text()
COMMANDS = re.findall(r"^\$ python -m torch_flash_mps (.+)$", PAGE, re.MULTILINE)
SMALL = ["bench", "--heads", "2", "--kv-heads", "1", "--repeats", "2", "--warm-up", "0"]
NO_GPU = "say nothing about a GPU"


@pytest.fixture(autouse=True)
def in_an_empty_folder(device, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def run_module(package_folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """As a user: a process of its own, the package from `package_folder`."""
    return subprocess.run([sys.executable, "-m", "torch_flash_mps", *arguments], text=True,
                          env={**os.environ, "PYTHONPATH": str(package_folder)},
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.mark.parametrize("command", COMMANDS)
def test_BD_06_the_commands_of_the_page(command, capsys):
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out


def test_every_command_is_on_the_page():
    assert {command.split()[0] for command in COMMANDS} == {"doctor", "selftest", "bench"}


def test_doctor_says_what_is_here(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for part in (torch.__version__, machine.device_name(), "Metal language  3.1", "flash_fwd_f16",
                 "flash_decode_f16", "PyTorch's own"):
        assert part in text
    assert ("simulated" in text) == (sys.platform != "darwin")


def test_doctor_sees_who_switched_sdpa(capsys):
    import torch_flash_mps

    with torch_flash_mps.sdpa_enabled():
        main(["doctor"])
    assert "to the Metal kernels, by sdpa_enabled()" in capsys.readouterr().out


BUILDS = {
    "not built": ("raise ModuleNotFoundError(__name__)", "the native module was not built"),
    "other torch": ("TORCH_VERSION = '2.12.1'\nSIMULATOR_MISSING = None\n",
                    "was built for torch 2.12.1, found"),
    "no simulator": (f"TORCH_VERSION = {torch.__version__!r}\nSIMULATOR_MISSING = 'no clang-19'\n",
                     "the simulated device was not built, because no clang-19"),
}


@pytest.mark.parametrize("name", BUILDS)
def test_BD_06_BD_02_doctor_says_why_nothing_can_run(tmp_path, name):
    """With exit status 1 and never a traceback."""
    build_info, reason = BUILDS[name]
    package = tmp_path / "torch_flash_mps"
    package.mkdir()
    for path in (ROOT / "torch_flash_mps").iterdir():
        if path.name not in ("_build_info.py", "__pycache__"):
            (package / path.name).symlink_to(path)
    (package / "_build_info.py").write_text(build_info)
    done = run_module(tmp_path, "doctor")
    assert done.returncode == (0 if name == "no simulator" and sys.platform == "darwin" else 1)
    if done.returncode:
        assert "The kernels cannot run here: " in done.stdout and reason in done.stdout
    assert "Traceback" not in done.stdout


def test_BD_06_selftest_as_a_user_runs_it():
    done = run_module(ROOT, "selftest", "--case", "KF-27")
    assert done.returncode == 0, done.stdout
    assert "2 anchors, all right" in done.stdout
    assert torch.__version__ in done.stdout


def test_BD_06_selftest_has_the_anchors(capsys):
    assert main(["selftest"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:-1]] == [
        ["ok", anchor.case, anchor.kernel] for anchor in anchors.ANCHORS]
    cases = {anchor.case for anchor in anchors.ANCHORS}
    assert cases >= {"KF-07", "KF-08", "KF-13", "KF-14", "KF-15", "KF-18", "KF-20", "KF-24",
                     "KF-25", "KF-27", "BW-04", "BW-07", "BW-08", "BW-09", "PY-04", "DE-05"}
    assert {anchor.kernel for anchor in anchors.ANCHORS} == {"forward", "decode", "backward"}


def test_each_anchor_runs_the_kernel_that_it_names(kernels):
    started = {"forward": "flash_fwd", "decode": "flash_decode", "backward": "flash_bwd_"}
    for anchor in anchors.ANCHORS:
        with torch.no_grad():
            list(anchor.results())
        ran = kernels()
        assert any(name.startswith(started[anchor.kernel]) for name in ran), anchor
        if anchor.kernel == "forward":
            assert set(ran) == {"flash_fwd"}, anchor


def _off(function):
    """A fault that no result survives: values, gradients and zeros are off by a little."""
    def call(*operands, **options):
        result = function(*operands, **options)
        results = result if isinstance(result, tuple) else (result,)
        moved = tuple(1.01 * x + 0.01 for x in results)
        return moved if isinstance(result, tuple) else moved[0]

    return call


def test_BD_06_a_wrong_kernel_fails_every_anchor(monkeypatch, capsys):
    for name in ("attention", "flash_attn_func", "flash_attn_with_kvcache"):
        monkeypatch.setattr(anchors, name, _off(getattr(anchors, name)))
    assert main(["selftest"]) == 1
    text = capsys.readouterr().out
    wrong = [line.split()[1] for line in text.splitlines() if line.startswith("WRONG")]
    assert wrong == [anchor.case for anchor in anchors.ANCHORS]
    assert f"{len(wrong)} anchors, {len(wrong)} wrong" in text


def test_an_error_of_the_op_fails_its_anchor_alone(monkeypatch, capsys):
    def fail(*operands, attn_mask=None, **options):
        raise RuntimeError("flash_fwd: pipeline failed")

    monkeypatch.setattr(anchors, "flash_attn_func", fail)
    chosen = [anchor for anchor in anchors.ANCHORS if anchor.case in ("KF-20", "PY-03")]
    assert selftest.run_anchors(chosen) == 1
    text = capsys.readouterr().out
    assert text.count("WRONG") == text.count("RuntimeError: flash_fwd: pipeline failed") == 2
    assert "4 anchors, 2 wrong" in text


def test_selftest_knows_its_cases(capsys):
    assert main(["selftest", "--case", "KF-27", "--case", "KF-99"]) == 2
    captured = capsys.readouterr()
    assert "expected a case of BW-04" in captured.err and "got KF-99\n" in captured.err
    assert not captured.out


@pytest.mark.parametrize("command", ["selftest", "bench"])
def test_without_a_device_nothing_runs(command, monkeypatch, capsys):
    monkeypatch.setattr(machine, "find_device", lambda: "no Metal device was found")
    assert main([command]) == 2
    captured = capsys.readouterr()
    assert "no Metal device was found" in captured.err and not captured.out


def test_DC_03_bench_writes_a_table_and_a_plot(capsys, tmp_path):
    assert main([*SMALL, "--seqlen", "20", "40", "--output", "new.png"]) == 0
    table = capsys.readouterr().out
    assert (tmp_path / "new.md").read_text() == table
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("|")][2:]
    assert [tuple(cell.strip() for cell in row[:2]) for row in rows] == [
        (op, seqlen) for op in bench.OPS for seqlen in ("20", "40")]
    assert all(re.fullmatch(r" \S+ ms \(\S+ to \S+\) ", cell) for row in rows for cell in row[2:5])
    assert f"torch {torch.__version__}" in table and "warm-up" in table
    image = Image.open(tmp_path / "new.png")
    assert image.size[0] > 2 * image.size[1] > 1000
    simulated = sys.platform != "darwin"
    assert (NO_GPU in table) == (NO_GPU in image.text["Title"]) == simulated


def _planted(monkeypatch, fault):
    """Ours, with a fault: a function of its operands and its result."""
    def calls(q, k, v, **options):
        right = baselines.attention_calls(q, k, v, **options)
        return right | {OURS: lambda: fault(right[OURS](), q)}

    monkeypatch.setattr(bench, "attention_calls", calls)


def _last_row(out, q):
    return torch.cat([out[:, :, :-1], out[:, :, -1:] * 1.1], dim=2)


def _gradient(out, q):
    return out + 0.1 * (q - q.detach())


@pytest.mark.parametrize(("op", "fault"), [("forward", _last_row), ("backward", _gradient),
                                           ("decode", _last_row)])
def test_DC_03_no_number_for_a_wrong_result(op, fault, monkeypatch, capsys):
    _planted(monkeypatch, fault)
    monkeypatch.setattr(bench, "CHECKED_ROWS", 5)
    assert main([*SMALL, "--seqlen", "20", "--op", op, "--dtype", "float32"]) == 1
    captured = capsys.readouterr()
    row = [cell.strip() for cell in captured.out.splitlines()[-1].split("|")]
    assert row[3] == "wrong result"
    assert all("ms" in cell for cell in row[4:6])
    assert f"{op}, seqlen 20, {OURS}: {'dq' if op == 'backward' else 'out'}" in captured.err


def test_what_does_not_fit_in_memory_is_left_out(monkeypatch, capsys):
    def calls(q, k, v, **options):
        def fail():
            raise RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)")

        return baselines.attention_calls(q, k, v, **options) | {NAIVE: fail}

    monkeypatch.setattr(bench, "attention_calls", calls)
    assert main([*SMALL, "--seqlen", "20", "--op", "decode"]) == 0
    assert "| out of memory |" in capsys.readouterr().out


def test_bench_asks_for_matplotlib(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec",
                        lambda name, *more: None if name == "matplotlib" else find(name, *more))
    assert main(["bench"]) == 2
    assert "pip install 'torch_flash_mps[bench]'" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "expected"), [
    (["--seqlen", "64", "0"], "--seqlen: expected an integer of at least 1, got 0"),
    (["--heads", "two"], "--heads: expected an integer of at least 1, got two"),
    (["--repeats", "0"], "--repeats: expected an integer of at least 1, got 0"),
    (["--warm-up", "nan"], "--warm-up: expected a number of at least 0, got nan"),
    (["--output", "bench.md"], "expected a file that ends in .png, in a folder that exists"),
    (["--output", "missing/bench.png"], "in a folder that exists, got missing/bench.png"),
])
def test_bench_refuses_an_argument_before_it_measures(arguments, expected, capsys):
    with pytest.raises(SystemExit) as exit:
        main([*SMALL, *arguments])
    assert exit.value.code == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "expected"), [
    (["--heads", "3", "--kv-heads", "2"], "a query head count that is a multiple of key's"),
    (["--head-dim", "600"], "expected head_dim and head_dim_v of at most 576"),
])
def test_bench_refuses_sizes_that_the_op_does_not_take(arguments, expected, capsys, tmp_path):
    assert main([*SMALL, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("bench: ") and expected in captured.err
    assert not captured.out and not list(tmp_path.iterdir())


def test_DC_03_where_ours_is_slower_is_said():
    def point(op, **seconds):
        return bench.Point(op, 128, "MATH", {name: Timing(s, s, s) for name, s in seconds.items()})

    fast = point("forward", **{OURS: 1.0, PYTORCH: 2.0, NAIVE: 3.0})
    slow = point("decode", **{OURS: 2.0, PYTORCH: 1.0, NAIVE: 3.0})
    assert bench.slower([fast]) == "Ours is slower nowhere."
    assert bench.slower([fast, slow]) == f"Ours is slower in: decode 128 ({PYTORCH}, 2.00×)."
    wrong = replace(fast, timings={NAIVE: Timing(1, 1, 1)}, failures={OURS: "wrong result"})
    assert "nowhere" in bench.slower([wrong])


def test_DC_03_calls_take_turns_after_a_warm_up_by_time(monkeypatch):
    order, now = [], [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def call(name, seconds):
        def run():
            order.append(name)
            now[0] += seconds
        return run

    calls = {"slow": call("slow", 2.0), "fast": call("fast", 0.5)}
    found = timing.interleaved(calls, lambda: None, 3, lambda: now[0], warm_up_seconds=1.0)
    assert order == ["slow", "fast", "fast", *["slow", "fast"] * 3]
    assert found["slow"].median == 2.0 and found["fast"].median == 0.5


def test_a_plain_title_says_nothing_of_a_simulator(monkeypatch):
    options = Namespace(batch=1, heads=8, kv_heads=2, head_dim=64, dtype="float16", causal=True,
                        op=["decode"])
    monkeypatch.setattr(machine, "is_simulated", lambda: False)
    assert bench.title(options) == "B 1, Hq 8, Hkv 2, D 64, float16"
