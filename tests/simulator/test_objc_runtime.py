"""Objective-C, Foundation, dispatch and Metal's objects behave as on a Mac: see objc/checks.mm."""

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform == "darwin":
    pytest.skip("a Mac has its own Objective-C", allow_module_level=True)

from build_support.simulator import LIBRARIES, OBJC_FLAGS, find_compiler

ROOT = Path(__file__).resolve().parents[2]
SIMULATOR = ROOT / "csrc" / "simulator"
CHECKS = Path(__file__).resolve().parent / "objc" / "checks.mm"


@pytest.fixture(scope="module")
def metal(simulator):
    from torch_flash_mps import _simulator

    return _simulator


@pytest.fixture(scope="module")
def checks(metal, tmp_path_factory):
    """checks.mm, compiled and linked to the loaded module as any host code would be."""
    library = tmp_path_factory.mktemp("objc") / "checks.so"
    sources = [CHECKS, SIMULATOR / "runtime" / "objc_personality.cpp",
               SIMULATOR / "runtime" / "objc_blocks.mm"]
    command = [*find_compiler(), "-std=c++20", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror",
               *OBJC_FLAGS, f"-I{SIMULATOR / 'frameworks'}", *map(str, sources), "-o", str(library),
               metal.__file__, *LIBRARIES, "-ldl", "-Wl,--allow-shlib-undefined"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


def call(checks, name: str) -> str:
    function = checks[name]
    function.restype = ctypes.c_char_p
    return function().decode()


def faults(metal) -> list[str]:
    return list(iter(metal.take_fault, None))


NAMES = [name for name in re.findall(r"const char\* (\w+)\(\)", CHECKS.read_text())
         if name.startswith("check_")]


@pytest.mark.parametrize("name", NAMES)
def test_objective_c(checks, metal, name):
    metal.set_gpu_family("apple7")
    assert call(checks, name) == ""
    refused = ["newBufferWithLength: expected 1 to"] if name == "check_buffers" else []
    found = faults(metal)
    assert len(found) == len(refused), found
    assert all(one.startswith(expected) for one, expected in zip(found, refused, strict=True))


def test_dispatch_sync_on_the_same_queue_is_an_exception_not_a_deadlock(checks, metal):
    message = call(checks, "nested_dispatch_sync")
    assert message.startswith("dispatch_sync on queue 'stream': the calling thread already runs")
    assert faults(metal) == [message]


def test_a_wait_that_nobody_ends_is_a_fault(checks, metal):
    message = call(checks, "wait_for_an_event_that_nobody_signals")
    assert "expected a signal of value 1 from work committed earlier, found value 0" in message
    assert faults(metal) == [message]
