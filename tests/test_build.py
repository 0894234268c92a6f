"""Building, installing and importing, as a user does (BD-02, BD-03, BD-04).

Each build happens in a copy of the sources with an environment of its own, in the place where the
Makefile has one: so that ccache knows what was compiled before.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINUX_ONLY = sys.platform == "linux"
VERSION = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
ATTENTION = """
import torch, torch_flash_mps
q = torch.randn(1, 2, 5, 16)
out = torch.ops.flash_mps.attention(q, q, q)
torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, q, q))
print(torch_flash_mps.__version__, torch_flash_mps.__file__)
"""
SIMULATED = """
import torch, torch_flash_mps.simulator
q = torch.randn(1, 2, 5, 16)
out = torch.ops.flash_mps.attention(*[q.to("mps")] * 3).cpu()
torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, q, q))
"""


class Environment:
    """A virtual environment with the packages of this one, or none but setuptools and pip."""

    def __init__(self, folder: Path, with_packages: bool = True):
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        here = Path(sysconfig.get_path("purelib"))
        there = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
        names = ("*",) if with_packages else ("setuptools*", "_distutils_hack", "pip*")
        for path in (path for name in names for path in here.glob(name)):
            if "torch_flash_mps" not in path.name:
                (there / path.name).symlink_to(path)

    def run(self, *arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run([str(self.python), *arguments], cwd=cwd, env={**env, **variables},
                              text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def pip(self, *arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess:
        return self.run("-m", "pip", "--disable-pip-version-check", *arguments, cwd=cwd,
                        **variables)


@pytest.fixture
def sources(tmp_path) -> Path:
    """A copy of what git has or would take."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True,
                            capture_output=True, check=True).stdout.splitlines()
    target = tmp_path / "sources"
    for name in listed:
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def ok(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 0, done.stdout
    return done.stdout


def run_here(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], text=True, cwd=ROOT,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def test_BD_03_metadata_needs_no_torch(tmp_path, sources):
    bare = Environment(sources / ".venv", with_packages=False)
    assert "No module named 'torch'" in bare.run("-c", "import torch", cwd=tmp_path).stdout
    assert ok(bare.run("setup.py", "--version", cwd=sources)).split() == [VERSION]
    hook = "from setuptools import build_meta as b; print(b.prepare_metadata_for_build_wheel('.'))"
    name = ok(bare.run("-c", hook, cwd=sources)).split()[-1]
    metadata = (sources / name / "METADATA").read_text()
    assert f"Version: {VERSION}" in metadata
    assert re.search(r"^Requires-Dist: torch\S*>=\S*", metadata, re.MULTILINE)


def test_BD_03_build_without_torch_gives_a_hint(tmp_path, sources):
    bare = Environment(sources / ".venv", with_packages=False)
    done = bare.pip("wheel", "--no-deps", "--no-build-isolation", ".", cwd=sources)
    assert done.returncode != 0
    hints = [line for line in done.stdout.splitlines() if "pip install torch" in line]
    assert len(hints) == 1 and "--no-build-isolation" in hints[0], done.stdout


@pytest.mark.parametrize("options", [[], ["--no-build-isolation"], ["-e"],
                                     ["--no-build-isolation", "-e"]], ids=" ".join)
def test_BD_03_pip_install(tmp_path, sources, options):
    environment = Environment(sources / ".venv")
    ok(environment.pip("install", "--no-deps", *options, ".", cwd=sources))
    version, module = ok(environment.run("-c", ATTENTION, cwd=tmp_path)).split()
    assert version == VERSION
    place = sources / ("torch_flash_mps" if "-e" in options else ".venv")
    assert Path(module).is_relative_to(place)
    if LINUX_ONLY:
        ok(environment.run("-c", SIMULATED, cwd=tmp_path))


def test_second_build_compiles_what_changed(tmp_path, sources):
    environment = Environment(sources / ".venv")
    command = ["setup.py", "build_ext", "--inplace"]
    assert "compile csrc/ops.cpp" in ok(environment.run(*command, cwd=sources))
    assert "no work to do" in ok(environment.run(*command, cwd=sources))
    for name in ("csrc/attn_args.h", "metal/tile.h"):
        (sources / name).write_text((sources / name).read_text() + "\n")
    again = ok(environment.run(*command, cwd=sources))
    assert "compile csrc/ops.cpp" in again and "embed metal/" in again
    assert "compile csrc/tiling.cpp" not in again


def tools_without_clang(folder: Path) -> Path:
    folder.mkdir()
    for name in ("c++", "g++", "gcc", "as", "ld", "ccache", "ninja", "sh"):
        if found := shutil.which(name):
            (folder / name).symlink_to(found)
    return folder


def test_BD_04_without_clang_the_simulated_device_is_left_out(tmp_path, sources):
    environment = Environment(sources / ".venv")
    path = str(tools_without_clang(tmp_path / "bin"))
    output = ok(environment.pip("install", "-v", "--no-deps", "--no-build-isolation", ".",
                                cwd=sources, PATH=path))
    assert "simulated Metal device is left out" in output and "clang-19" in output
    ok(environment.run("-c", ATTENTION, cwd=tmp_path))
    imported = environment.run("-c", "import torch_flash_mps.simulator", cwd=tmp_path)
    assert imported.returncode != 0
    assert re.search(r"^ImportError: .*clang-19", imported.stdout, re.MULTILINE), imported.stdout


def test_each_missing_library_is_named(monkeypatch):
    from build_support import simulator

    assert simulator.find_compiler()
    absent = simulator.Requirement("libabsent-dev", "absent.h", "absent")
    monkeypatch.setattr(simulator, "REQUIREMENTS", (*simulator.REQUIREMENTS, absent))
    with pytest.raises(simulator.MissingRequirement, match="not installed: libabsent-dev$"):
        simulator.find_compiler()


def test_BD_02_build_for_another_torch_is_refused():
    import torch

    patch = ("import sys, types; info = types.ModuleType('torch_flash_mps._build_info'); "
             "info.TORCH_VERSION = '2.12.1'; info.SIMULATOR_MISSING = None; "
             "sys.modules[info.__name__] = info; import torch_flash_mps")
    done = run_here(patch)
    message = done.stdout.splitlines()[-1]
    assert done.returncode != 0
    assert message.startswith("ImportError: torch_flash_mps was built for torch 2.12.1")
    assert torch.__version__ in message and "pip install" in message


def test_BD_04_import_succeeds_without_native_module_or_mps():
    hide = "import sys; sys.modules['torch_flash_mps._build_info'] = None; "
    show = ("import torch_flash_mps as t; print(t.is_available()); print(t.unavailable_reason()); "
            "import torch; q = torch.randn(1, 1, 2, 4); t.attention(q, q, q)")
    done = run_here(hide + show)
    answer, reason, *_, error = done.stdout.splitlines()
    assert (answer, done.returncode) == ("False", 1)
    assert "not built" in reason and "pip install" in reason
    assert error.startswith("RuntimeError") and "not built" in error


def test_BD_04_import_without_mps_says_so():
    code = "import torch_flash_mps as t; print(t.is_available()); print(t.unavailable_reason())"
    answer, reason = ok(run_here(code)).splitlines()
    if LINUX_ONLY:
        assert (answer, "torch_flash_mps.simulator" in reason) == ("False", True)
    else:
        assert (answer, reason) == ("True", "None")
