"""The executor alone, on kernels written by hand: no compiler, no Objective-C, no torch."""

import subprocess
from pathlib import Path

from build_support.simulator import find_compiler

ROOT = Path(__file__).parents[2]
RUNTIME = ROOT / "csrc" / "simulator" / "runtime"
TESTS = Path(__file__).parent / "executor"
SOURCES = (
    "access_checker", "buffer_map", "crash_guard", "device_shadow", "dispatch_run", "executor",
    "fault_text", "fibre_stacks", "matrix_log", "threadgroup", "threadgroup_faults",
    "threadgroup_memory", "traffic",
)


def test_results_counters_and_faults(tmp_path):
    program = tmp_path / "executor"
    sources = [*(RUNTIME / f"{name}.cpp" for name in SOURCES), *TESTS.glob("*.cpp")]
    subprocess.run(
        [*find_compiler(), "-std=c++20", "-O1", "-Wall", "-Wextra",
         "-Werror", f"-I{RUNTIME}", *sources, "-o", program, "-lboost_context", "-pthread"],
        check=True,
    )
    done = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "results: 0 failures" in done.stdout
    assert "cases, 0 failures" in done.stdout
