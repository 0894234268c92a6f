"""Barriers and simdgroup operations that not all threads reach, planted in Metal source.

The report must name the kernel, a thread that waits, one that does not, and the lines of both.
"""

import sys

import numpy as np
import planted
import pytest
from planted import thread

if sys.platform == "darwin":
    pytest.skip("a Mac reports none of this", allow_module_level=True)

RETURNED = "has returned without reaching it"
EVERY_THREAD = "every thread of the threadgroup must reach it"
EVERY_LANE = "every thread of the simdgroup must reach it"
EXCHANGE = "a simdgroup shuffle, reduction or vote"

BARRIERS = {
    "barrier_in_a_branch": (
        "if (!FAULT || t < 40)\n"
        "  threadgroup_barrier(mem_flags::mem_threadgroup);",
        f"{thread(32)} waits at threadgroup_barrier (line +2), but {thread(40)} {RETURNED}; "
        f"{EVERY_THREAD}"),
    "barrier_in_a_branch_of_one_simdgroup": (
        "if (!FAULT || t < 32) threadgroup_barrier(mem_flags::mem_threadgroup);",
        f"{thread(0)} waits at threadgroup_barrier (line +1), but {thread(32)} {RETURNED}; "
        f"{EVERY_THREAD}"),
    "early_return": (
        "if (FAULT && i == 100) return;\n"
        "out[i] = 1;\n"
        "threadgroup_barrier(mem_flags::mem_device);\n"
        "out[i] = 2;",
        f"{thread(96)} waits at threadgroup_barrier (line +3), but {thread(100)} {RETURNED}; "
        f"{EVERY_THREAD}"),
    "loop_of_unequal_length": (
        "for (uint n = 0; n < (FAULT ? 1 + t / 32 : 2); ++n)\n"
        "  threadgroup_barrier(mem_flags::mem_threadgroup);",
        f"{thread(32)} waits at threadgroup_barrier (line +2), but {thread(31)} {RETURNED}; "
        f"{EVERY_THREAD}"),
    "two_barriers_in_two_branches": (
        "if (FAULT && t < 32)\n"
        "  threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "else\n"
        "  threadgroup_barrier(mem_flags::mem_threadgroup);",
        f"{thread(0)} waits at threadgroup_barrier (line +2), but {thread(63)} waits at another "
        f"one (line +4); {EVERY_THREAD}"),
    "two_barriers_in_two_branches_of_a_simdgroup": (
        "if (FAULT && lane >= 16)\n"
        "  threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "else\n"
        "  threadgroup_barrier(mem_flags::mem_threadgroup);",
        f"{thread(0)} waits at threadgroup_barrier (line +4), but {thread(16)} waits at another "
        f"one (line +2); {EVERY_THREAD}"),
    "two_barriers_in_one_line": (
        "if (FAULT && t == 1) threadgroup_barrier(mem_flags::mem_none);"
        " else threadgroup_barrier(mem_flags::mem_none);",
        f"{thread(0)} waits at threadgroup_barrier (line +1), but {thread(1)} waits at another "
        f"one (line +1); {EVERY_THREAD}"),
    "two_kinds_of_barrier": (
        "if (FAULT && lane == 3)\n"
        "  simdgroup_barrier(mem_flags::mem_none);\n"
        "else\n"
        "  threadgroup_barrier(mem_flags::mem_none);",
        f"{thread(0)} waits at threadgroup_barrier (line +4), but {thread(3)} waits at "
        f"simdgroup_barrier (line +2); {EVERY_THREAD}"),
    "simdgroup_barrier_in_a_branch": (
        "if (!FAULT || lane < 31) simdgroup_barrier(mem_flags::mem_none);",
        f"{thread(0)} waits at simdgroup_barrier (line +1), but {thread(31)} {RETURNED}; "
        f"{EVERY_LANE}"),
    "simdgroup_barrier_of_one_simdgroup": (
        "if (t < 32 && (!FAULT || t != 9)) simdgroup_barrier(mem_flags::mem_none);",
        f"{thread(0)} waits at simdgroup_barrier (line +1), but {thread(9)} {RETURNED}; "
        f"{EVERY_LANE}"),
}

SIMDGROUP_OPERATIONS = {
    "sum_in_a_branch": (
        "out[i] = lane;\n"
        "if (!FAULT || lane >= 16)\n"
        "  out[i] = simd_sum(float(i));",
        f"{thread(16)} waits at {EXCHANGE} (line +3), but {thread(0)} {RETURNED}; {EVERY_LANE}"),
    "shuffles_in_two_branches": (
        "if (FAULT && lane < 16)\n"
        "  out[i] = simd_shuffle_xor(i, 1);\n"
        "else\n"
        "  out[i] = simd_shuffle_xor(i, 2);",
        f"{thread(0)} waits at {EXCHANGE} (line +2), but {thread(16)} waits at another one "
        f"(line +4); {EVERY_LANE}"),
    "vote_after_a_return": (
        "if (FAULT && lane == 7) return;\n"
        "out[i] = simd_any(i == 3);",
        f"{thread(0)} waits at {EXCHANGE} (line +2), but {thread(7)} {RETURNED}; {EVERY_LANE}"),
    "shuffle_beside_a_barrier": (
        "if (FAULT && t == 33)\n"
        "  threadgroup_barrier(mem_flags::mem_none);\n"
        "out[i] = simd_shuffle(i, 5);",
        f"{thread(32)} waits at {EXCHANGE} (line +3), but {thread(33)} waits at "
        f"threadgroup_barrier (line +2); {EVERY_LANE}"),
    "matrix_product_in_a_branch": (
        "simdgroup_float8x8 a(1), b(2), c(0);\n"
        "if (!FAULT || lane != 9) simdgroup_multiply_accumulate(c, a, b, c);\n"
        "out[i] = c.thread_elements()[0];",
        f"{thread(0)} waits at a simdgroup matrix operation, but {thread(9)} {RETURNED}; "
        f"{EVERY_LANE}"),
    "matrix_products_of_unequal_number": (
        "simdgroup_float8x8 a(1), b(2), c(0);\n"
        "for (uint n = 0; n < (FAULT ? 1 + lane / 31 : 2); ++n)\n"
        "  simdgroup_multiply_accumulate(c, a, b, c);\n"
        "out[i] = c.thread_elements()[0];",
        f"{thread(31)} has multiplied 2 simdgroup matrices where {thread(0)} has multiplied 1; "
        "every thread of a simdgroup must reach each simdgroup matrix operation"),
    "matrix_product_that_nobody_reads": (
        "simdgroup_float8x8 a(1), b(2), c(0);\n"
        "if (!FAULT || lane == 9) simdgroup_multiply_accumulate(c, a, b, c);",
        f"{thread(9)} waits at a simdgroup matrix operation, but {thread(0)} {RETURNED}; "
        f"{EVERY_LANE}"),
}
CASES = BARRIERS | SIMDGROUP_OPERATIONS


@pytest.fixture(scope="module")
def plants(checked_metal):
    return planted.Plants(checked_metal, CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_planted_fault_is_reported_and_its_twin_is_not(plants, name):
    plants.check(name)


def test_a_loop_around_a_barrier_is_one_place(checked_metal):
    """Unrolled or inlined twice, a barrier is still the one in the source."""
    source = planted.PREAMBLE + """
    void meet(threadgroup float* values, uint t) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      values[t] += 1;
    }
    KERNEL(unrolled) {
      scratch[t] = 0;
    #pragma unroll
      for (int n = 0; n < 4; ++n) meet(scratch, t);
      if (table[0] > 0) meet(scratch, t);
      out[i] = scratch[t];
    }"""
    kernel = checked_metal.Library(source).kernel("unrolled")
    out, none = np.zeros(64, dtype=np.float32), np.zeros(1, dtype=np.float32)
    kernel(out, none, np.float32(1).tobytes(), none, grid=(1, 1, 1), threadgroup=(64, 1, 1),
           threadgroup_memory={0: 256})
    assert out.tolist() == [5] * 64
