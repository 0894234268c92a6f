"""Compiled pipelines on disk: found again, keyed by everything, repaired, shared and bounded."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

if sys.platform == "darwin":
    pytest.skip("Metal caches pipelines itself", allow_module_level=True)

from build_support.simulator import find_compiler

ROOT = Path(__file__).parents[2]
MEGABYTE = 1 << 20
# Each line of input is one pipeline to build and run, or a way to spoil the cache. Each line of
# output is what the kernel gave, and how often a compiler was started for it.
PROGRAM = """
import json, os, pathlib, sys
import numpy as np
import torch_flash_mps.simulator
from torch_flash_mps import _simulator

cache, log = map(pathlib.Path, sys.argv[1:])
count = lambda: len(log.read_text().splitlines()) if log.exists() else 0
for step in map(json.loads, sys.stdin):
    before = count()
    if "spoil" in step:
        for path in cache.glob("*" + step["suffix"]):
            content = path.read_bytes()
            spoilt = {"empty": b"", "half": content[:len(content) // 2],
                      "noise": os.urandom(len(content)),
                      "one byte": content[:len(content) // 2] + b"?"
                                  + content[len(content) // 2 + 1:]}[step["spoil"]]
            # A new file, as after a crash: the old one is mapped by this process.
            pathlib.Path(str(path) + ".new").write_bytes(spoilt)
            os.replace(str(path) + ".new", path)
        continue
    _simulator.set_checks(step.get("checks", False))
    options = step.get("fast_math", True), step.get("macros", {})
    library = _simulator.Library(step["source"], *options)
    out = np.zeros(1, dtype=np.int32)
    library.kernel("f", {0: ("int", step.get("constant", 1))})(
        out, grid=(1, 1, 1), threadgroup=(1, 1, 1))
    print(json.dumps([int(out[0]), count() - before]), flush=True)
"""
SOURCE = """
#include <metal_stdlib>
constant int kAddend [[function_constant(0)]];
#ifndef BASE
#define BASE 40
#endif
kernel void f(device int* out [[buffer(0)]]) { out[0] = BASE + kAddend; }
"""
STEP = {"source": SOURCE}


class Cache:
    """A cache folder of its own, and a compiler that keeps a log."""

    def __init__(self, folder: Path, compiler: str):
        self.folder, self.log = folder / "cache", folder / "log"
        self.clang = folder / "clang++"
        self.clang.write_text(f'#!/bin/sh\necho start >> "{self.log}"\nexec {compiler} "$@"\n')
        self.clang.chmod(0o755)

    def start(self) -> subprocess.Popen:
        env = os.environ | {"TORCH_FLASH_MPS_CACHE": str(self.folder), "PYTHONPATH": str(ROOT),
                            "TORCH_FLASH_MPS_CLANG": str(self.clang)}
        return subprocess.Popen([sys.executable, "-c", PROGRAM, str(self.folder), str(self.log)],
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True, env=env)

    def run(self, *steps: dict) -> list[list[int]]:
        return finish(self.start(), *steps)

    def files(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}


def finish(process: subprocess.Popen, *steps: dict) -> list[list[int]]:
    out, errors = process.communicate("\n".join(map(json.dumps, steps)), timeout=300)
    assert process.returncode == 0, errors
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture(scope="module")
def compiler():
    return shutil.which(find_compiler()[0])


@pytest.fixture
def cache(tmp_path, compiler):
    return Cache(tmp_path, compiler)


def test_a_warm_start_compiles_nothing_unless_the_compiler_changed(cache):
    ((cold, starts),) = cache.run(STEP)
    assert cold == 41 and starts > 0
    files = cache.files()
    assert cache.run(STEP) == [[41, 0]]
    assert cache.files() == files
    cache.clang.write_text(cache.clang.read_text() + "\n# another\n")
    ((value, starts),) = cache.run(STEP)
    assert value == 41 and starts > 0


def test_whatever_changes_the_code_is_another_entry(cache):
    first, *changed, again = cache.run(
        STEP, STEP | {"constant": 2}, STEP | {"source": SOURCE.replace("40", "50")},
        STEP | {"macros": {"BASE": "60"}}, STEP | {"checks": True}, STEP | {"fast_math": False},
        STEP)
    assert [value for value, _ in changed] == [42, 51, 61, 41, 41]
    assert all(starts > 0 for _, starts in [first, *changed])
    assert again == [41, 0]


def test_a_spoilt_entry_is_made_again(cache):
    """An entry may be cut off or overwritten: by a full disk, or by a machine that lost power."""
    kinds = [{"spoil": spoil, "suffix": suffix} for suffix in (".so", ".msl", ".pch")
             for spoil in ("empty", "half", "noise", "one byte")]
    # The library itself is needed when a pipeline is built.
    steps = [step for kind in kinds
             for step in (kind, {"spoil": "empty", "suffix": ".so"}, STEP, STEP)]
    first, *results = cache.run(STEP, *steps)
    for kind, (value, starts), again in zip(kinds, results[::2], results[1::2], strict=True):
        assert value == 41 and starts > 0, kind
        assert again == [41, 0], kind


def test_processes_that_start_at_once(cache):
    processes = [cache.start() for _ in range(3)]
    for process in processes:
        process.stdin.write(json.dumps(STEP) + "\n")
        process.stdin.flush()
    for process in processes:
        (first, _), again = finish(process, STEP)
        assert first == 41 and again == [41, 0]
    suffixes = sorted(Path(name).suffix for name in cache.files())
    assert suffixes == [".msl", ".pch", ".so"], "one entry of each kind and no partial file"


def test_the_oldest_entries_make_room(cache):
    cache.run(STEP)
    mine = cache.files()
    now = time.time()
    for age in range(30):
        path = cache.folder / f"{age:032x}.so"
        path.touch()
        os.truncate(path, 20 * MEGABYTE)
        os.utime(path, (now - 1000 - age, now - 1000 - age))
    left_behind, in_use = cache.folder / "tmp-1-0.so", cache.folder / "tmp-2-0.so"
    for path, age in ((left_behind, 7200), (in_use, 60)):
        path.touch()
        os.utime(path, (now - age, now - age))
    cache.run(STEP | {"constant": 2})
    sizes = {path.name: path.stat().st_size for path in cache.folder.iterdir()}
    assert 300 * MEGABYTE < sum(sizes.values()) <= 512 * MEGABYTE
    assert mine <= set(sizes), "what was used last stays"
    ages = sorted(int(name[:32], 16) for name, size in sizes.items() if size == 20 * MEGABYTE)
    assert ages == list(range(len(ages))), "the oldest go first"
    assert in_use.name in sizes and left_behind.name not in sizes


def test_a_folder_that_cannot_be_made_is_an_error(cache):
    cache.folder.write_text("a file where the folder should be")
    process = cache.start()
    _, errors = process.communicate(json.dumps(STEP), timeout=300)
    assert process.returncode == 1
    assert "cannot create the cache folder" in errors and "TORCH_FLASH_MPS_CACHE" in errors
