"""The examples run as a user runs them, and their own checks pass.

All but one in this process, so that they share what takes most of the time: loading SmolLM2.
"""

import re
import subprocess
import sys
from pathlib import Path

import embed
import finetune
import generate
import pytest
import serve_paged

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture
def run(device, capsys):
    """A function: what an example prints that was given these arguments."""

    def run_example(example, *arguments):
        assert example.main([*arguments]) == 0
        return capsys.readouterr().out

    return run_example


def _check_generation(text, *, tokens, layers, kernels=("flash_fwd", "flash_decode")):
    assert f"{tokens} generated, the same as eager" in text
    prefill, decode = text.split("  prefill:\n")[1].split("  decode:\n")
    for part, passes, kernel in zip((prefill, decode), (1, tokens - 1), kernels, strict=True):
        assert f"{layers * passes} of {layers * passes} attention calls" in part
        assert re.search(rf"kernel: {kernel}_\w+, {layers * passes} times", part)
    assert float(re.search(r"largest difference (\S+)", text)[1]) < 1e-3


def _reads_each_key_once(text):
    """Whether the decode steps do; a Mac does not count."""
    if "bytes not measured" in text:
        return sys.platform == "darwin"
    ratio = re.search(r"(\S+) of the least possible", text.split("  decode:\n")[1])[1]
    return float(ratio) == pytest.approx(1, abs=0.02)


def test_generate_as_a_user_runs_it():
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "generate.py"), "--max-new-tokens", "6"],
        capture_output=True, text=True, timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    _check_generation(done.stdout, tokens=6, layers=30)
    assert _reads_each_key_once(done.stdout)


def test_generate_with_a_static_cache(run):
    text = run(generate, "--max-new-tokens", "4", "--cache", "static")
    _check_generation(text, tokens=4, layers=30)
    assert _reads_each_key_once(text)   # and nothing of what is not filled yet


def test_IN_02_generate_for_prompts_of_unequal_length(run):
    text = run(generate, "--max-new-tokens", "5", "--prompt", "Hello.",
               "--prompt", "What is the capital of Peru?")
    _check_generation(text, tokens=5, layers=30)
    assert _reads_each_key_once(text)
    assert "The capital of Peru is" in text


def test_generate_with_an_8_bit_cache(run):
    text = run(generate, "--max-new-tokens", "5", "--cache", "int8")
    assert _reads_each_key_once(text)
    assert re.search(r"kernel: flash_decode\w*, 120 times", text)


def test_generate_with_gemma(run):
    """Prompts too short for the forward kernel: the decode kernel runs in each pass."""
    text = run(generate, "--model", "gemma3", "--max-new-tokens", "3", "--prompt", "The sea is")
    _check_generation(text, tokens=3, layers=18, kernels=["flash_decode"] * 2)


def test_generate_needs_a_decode_step(run):
    with pytest.raises(SystemExit):
        run(generate, "--max-new-tokens", "1")


def test_serve_paged(run):
    text = run(serve_paged, "--requests", "3", "--pages", "8")
    assert "requests: 3 of 3 the same as alone" in text
    assert "pages:    8 of 8 free" in text
    assert "kernel:   flash_decode" in text


def test_embed(device, capsys):
    assert embed.main() == 0
    text = capsys.readouterr().out
    assert float(re.search(r"smallest cosine (\S+)", text)[1]) > 0.99999
    assert float(re.search(r"largest difference (\S+),", text)[1]) < 1e-4


def test_finetune(run):
    """Two steps; examples/finetune.py itself fails where a loss differs or a kernel did not run."""
    text = run(finetune, "--steps", "2", "--length", "16")
    assert "60 of 60 attention calls, 60 backward" in text
    assert float(re.search(r"largest relative difference (\S+)", text)[1]) < 1e-4
