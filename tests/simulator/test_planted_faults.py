"""Memory: each fault that the simulated device promises to report, planted in Metal source.

The report must name the kernel, the thread, the slot or array and the byte offset.
"""

import sys

import numpy as np
import planted
import pytest
from planted import thread

if sys.platform == "darwin":
    pytest.skip("a Mac reports none of this", allow_module_level=True)

OUTSIDE = "outside every bound buffer"
UNORDERED = "without a barrier in between"
OTHER_GROUP = "threadgroups of one dispatch are not ordered"
OUT, IN, COUNT = (f"slot {slot} '{name}' (512 bytes)"
                  for slot, name in ((0, "out"), (1, "in"), (3, "count")))
SHARED = "threadgroup float shared[GROUP];\n"
CLEARED = (SHARED + "shared[t] = 0;\n"
           "threadgroup_barrier(mem_flags::mem_threadgroup);\n")
SHARED_ARRAY = "threadgroup array 'shared' (256 bytes)"

BOUNDS = {
    "read_past_the_end": (
        "out[i] = in[i + FAULT];",
        f"{thread(127)} reads 4 bytes at byte offset 512 of {IN}, {OUTSIDE}"),
    "read_at_a_negative_index": (
        "out[i] = in[int(i) - FAULT];",
        f"{thread(0)} reads 4 bytes at byte offset -4 of {IN}, {OUTSIDE}"),
    "write_past_the_end": (
        "out[i + FAULT] = 1;",
        f"{thread(127)} writes 4 bytes at byte offset 512 of {OUT}, {OUTSIDE}"),
    "write_at_a_negative_index": (
        "out[int(i) - FAULT] = 1;",
        f"{thread(0)} writes 4 bytes at byte offset -4 of {OUT}, {OUTSIDE}"),
    "first_byte_past_the_end": (
        "const device uchar* bytes = reinterpret_cast<const device uchar*>(in);\n"
        "out[i] = bytes[i == 127 ? 511 + FAULT : 0];",
        f"{thread(127)} reads 1 byte at byte offset 512 of {IN}, {OUTSIDE}"),
    "last_byte_before_the_beginning": (
        "device uchar* bytes = reinterpret_cast<device uchar*>(out);\n"
        "if (i == 64) bytes[-FAULT] = 1;",
        f"{thread(64)} writes 1 byte at byte offset -1 of {OUT}, {OUTSIDE}"),
    "write_across_the_end": (
        "if (i == 127) *reinterpret_cast<device packed_float2*>(out + 126 + FAULT) = float2(1);",
        f"{thread(127)} writes 8 bytes at byte offset 508 of {OUT}, {OUTSIDE}"),
    "read_past_constant_bytes": (
        "out[i] = table[i / 32 + FAULT];",
        f"{thread(96)} reads 4 bytes at byte offset 16 of slot 2 'table' (16 bytes), {OUTSIDE}"),
    "atomic_past_the_end": (
        "atomic_fetch_add_explicit(&count[i + FAULT], 1u, memory_order_relaxed);",
        f"{thread(127)} updates 4 bytes at byte offset 512 of {COUNT}, {OUTSIDE}"),
    "matrix_past_the_end": (
        "simdgroup_float8x8 m;\n"
        "simdgroup_load(m, in, 8, ulong2(0, 8 + FAULT));\n"
        "out[i] = m.thread_elements()[0] + m.thread_elements()[1];",
        f"{thread(22)} reads * bytes at byte offset 512 of {IN}, {OUTSIDE}"),
    "past_a_threadgroup_array": (
        "threadgroup float other[GROUP];\n" + SHARED +
        "other[t] = 1;\n"
        "shared[t + FAULT] = 1;\n"
        "out[i] = shared[t + FAULT] + other[t];",
        f"{thread(63)} writes 4 bytes at byte offset 256 of {SHARED_ARRAY}, outside the array"),
    "before_a_threadgroup_argument": (
        "scratch[int(t) - FAULT] = 1;",
        f"{thread(0)} writes 4 bytes at byte offset -4 of threadgroup array 'scratch' (256 bytes), "
        "outside the array"),
}

THREADGROUP_RACES = {
    "two_writes": (
        SHARED + "shared[FAULT ? 5 : t] = t;",
        f"{thread(1)} writes 4 bytes at byte offset 20 of {SHARED_ARRAY}, "
        f"which {thread(0)} has written {UNORDERED}"),
    "write_then_read": (
        CLEARED +
        "if (t == 3) shared[3] = 1;\n"
        "if (!FAULT) threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "if (t == 50) out[i] = shared[3];",
        f"{thread(3)} writes 4 bytes at byte offset 12 of {SHARED_ARRAY}, "
        f"which {thread(50)} has read {UNORDERED}"),
    "read_then_write": (
        SHARED +
        "shared[t] = t;\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "if (t == 2) out[i] = shared[0];\n"
        "if (!FAULT) threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "if (t == 40) shared[0] = 1;",
        f"{thread(2)} reads 4 bytes at byte offset 0 of {SHARED_ARRAY}, "
        f"which {thread(40)} has written {UNORDERED}"),
    "barrier_for_no_memory": (
        SHARED +
        "shared[t] = t;\n"
        "threadgroup_barrier(FAULT ? mem_flags::mem_none : mem_flags::mem_threadgroup);\n"
        "out[i] = shared[(t + 1) % GROUP];",
        f"{thread(63)} reads 4 bytes at byte offset 0 of {SHARED_ARRAY}, "
        f"which {thread(0)} has written {UNORDERED}"),
    "barrier_for_device_memory": (
        SHARED +
        "shared[t] = t;\n"
        "threadgroup_barrier(FAULT ? mem_flags::mem_device : mem_flags::mem_threadgroup);\n"
        "out[i] = shared[(t + 1) % GROUP];",
        f"{thread(63)} reads 4 bytes at byte offset 0 of {SHARED_ARRAY}, "
        f"which {thread(0)} has written {UNORDERED}"),
    "no_simdgroup_barrier": (
        CLEARED +
        "if (t == 33) shared[7] = 1;\n"
        "if (!FAULT) simdgroup_barrier(mem_flags::mem_threadgroup);\n"
        "if (t == 34) out[i] = shared[7];",
        f"{thread(34)} reads 4 bytes at byte offset 28 of {SHARED_ARRAY}, "
        f"which {thread(33)} has written {UNORDERED}"),
    "simdgroup_barrier_between_simdgroups": (
        CLEARED +
        "if (t == 1) shared[7] = 1;\n"
        "simdgroup_barrier(mem_flags::mem_threadgroup);\n"
        "if (t == (FAULT ? 34 : 2)) out[i] = shared[7];",
        f"{thread(1)} writes 4 bytes at byte offset 28 of {SHARED_ARRAY}, "
        f"which {thread(34)} has read {UNORDERED}"),
    "shuffle_as_a_barrier": (
        SHARED +
        "shared[t] = t;\n"
        "out[i] = simd_sum(1.0f);\n"
        "if (!FAULT) simdgroup_barrier(mem_flags::mem_threadgroup);\n"
        "out[i] += shared[t ^ 1];",
        f"{thread(31)} reads 4 bytes at byte offset 120 of {SHARED_ARRAY}, "
        f"which {thread(30)} has written {UNORDERED}"),
    "half_a_word": (
        "threadgroup half shared[GROUP];\n"
        "shared[FAULT ? t / 2 : t] = t;",
        f"{thread(1)} writes 2 bytes at byte offset 0 of threadgroup array 'shared' (128 bytes), "
        f"which {thread(0)} has written {UNORDERED}"),
    "matrix_store_then_load": (
        CLEARED +
        "simdgroup_float8x8 m(1);\n"
        "if (t < 32) simdgroup_store(m, shared);\n"
        "if (!FAULT) threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "if (t >= 32) simdgroup_load(m, shared);\n"
        "out[i] = m.thread_elements()[0];",
        f"{thread(31)} writes * bytes at byte offset 248 of {SHARED_ARRAY}, "
        f"which {thread(63)} has read {UNORDERED}"),
    "threadgroup_argument": (
        "scratch[FAULT ? 0 : t] = t;",
        f"{thread(1)} writes 4 bytes at byte offset 0 of threadgroup array 'scratch' (256 bytes), "
        f"which {thread(0)} has written {UNORDERED}"),
}

DEVICE_RACES = {
    "write_then_read_of_a_neighbour": (
        "if (i == 70) out[3] = 1;\n"
        "if (!FAULT) threadgroup_barrier(mem_flags::mem_device);\n"
        "if (i == 71) out[4] = out[3];",
        f"{thread(71)} reads 4 bytes at byte offset 12 of {OUT}, "
        f"which {thread(70)} has written {UNORDERED}"),
    "barrier_for_threadgroup_memory": (
        "out[i] = t;\n"
        "threadgroup_barrier(FAULT ? mem_flags::mem_threadgroup : mem_flags::mem_device);\n"
        "const float other = out[i ^ 1];\n"
        "threadgroup_barrier(mem_flags::mem_device);\n"
        "out[i] = other;",
        f"{thread(63)} reads 4 bytes at byte offset 248 of {OUT}, "
        f"which {thread(62)} has written {UNORDERED}"),
    "two_threadgroups_write": (
        "if (i % 64 == 9) out[FAULT ? 2 : i] = i;",
        f"{thread(73)} writes 4 bytes at byte offset 8 of {OUT}, "
        f"which {thread(9)} has written; {OTHER_GROUP}"),
    "a_threadgroup_reads_what_another_writes": (
        "out[i] = i;\n"
        "threadgroup_barrier(mem_flags::mem_device);\n"
        "if (i == 67) out[i] = out[FAULT ? 7 : 68];",
        f"{thread(67)} reads 4 bytes at byte offset 28 of {OUT}, "
        f"which {thread(7)} has written; {OTHER_GROUP}"),
    "write_beside_atomics": (
        "atomic_fetch_add_explicit(&count[0], 1u, memory_order_relaxed);\n"
        "if (FAULT && i == 3) *reinterpret_cast<device uint*>(count) = 0;",
        f"{thread(3)} writes 4 bytes at byte offset 0 of {COUNT}, "
        f"which an atomic operation has written {UNORDERED}"),
}

NEVER_WRITTEN = {
    "nothing_wrote_it": (
        SHARED +
        "if (!FAULT || t != 9) shared[t] = t;\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "out[i] = shared[t];",
        f"{thread(9)} reads 4 bytes at byte offset 36 of {SHARED_ARRAY}, "
        "which no thread has written so far"),
    "another_threadgroup_wrote_it": (
        SHARED +
        "if (!FAULT || group == 0 || t != 5) shared[t] = t;\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "if (t == 5) out[i] = shared[5];",
        f"{thread(69)} reads 4 bytes at byte offset 20 of {SHARED_ARRAY}, "
        "which no thread has written so far"),
    "half_of_it_was_written": (
        SHARED +
        "threadgroup half* halves = reinterpret_cast<threadgroup half*>(shared);\n"
        "halves[2 * t] = t;\n"
        "if (!FAULT) halves[2 * t + 1] = t;\n"
        "if (t == 0) out[i] = shared[t];",
        f"{thread(0)} reads 4 bytes at byte offset 2 of {SHARED_ARRAY}, "
        "which no thread has written so far"),
}
CASES = BOUNDS | THREADGROUP_RACES | DEVICE_RACES | NEVER_WRITTEN


@pytest.fixture(scope="module")
def plants(checked_metal):
    return planted.Plants(checked_metal, CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_planted_fault_is_reported_and_its_twin_is_not(plants, name):
    plants.check(name)


def test_a_read_before_the_offset_of_a_binding(checked_metal):
    """The bytes exist, in the same MTLBuffer, but were not bound."""
    source = """
    kernel void shift(device float* out [[buffer(0)]], const device float* in [[buffer(1)]]) {
      out[0] = in[-1];
    }"""
    kernel = checked_metal.Library(source).kernel("shift")
    out, numbers = np.zeros(1, dtype=np.float32), np.arange(8, dtype=np.float32)
    size = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
    with pytest.raises(RuntimeError) as fault:
        kernel(out, (numbers, 16), **size)
    assert str(fault.value) == (f"kernel 'shift': {thread(0)} reads 4 bytes at byte offset -4 of "
                                f"slot 1 'in' (16 bytes), {OUTSIDE}")


def test_a_slot_without_a_buffer(checked_metal):
    source = """
    kernel void sum(device float* out [[buffer(0)]], const device float* bias [[buffer(6)]],
                    constant bool& has_bias [[buffer(1)]]) {
      out[0] = has_bias ? bias[3] : 1.0f;
    }"""
    kernel = checked_metal.Library(source).kernel("sum")
    out, bias = np.zeros(1, dtype=np.float32), np.arange(4, dtype=np.float32)
    size = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
    with pytest.raises(RuntimeError, match="kernel 'sum', argument 'bias' at buffer slot 6: "
                                           "expected a buffer or bytes, found an unbound slot"):
        kernel(out, b"\x01", **size)
    kernel(out, b"\x01", None, None, None, None, bias, **size)
    assert out[0] == 3


# A kernel without checks ends in a signal, as it would on no Mac: that is a report as well.
CRASHES = {
    "wild_pointer": (
        "out[int64_t(i) - (FAULT ? 1l << 40 : 0)] = 1;", "writes address 0x"),
    "pointer_that_is_no_address": (
        "out[i + (FAULT ? 1ul << 60 : 0)] = 1;", "uses a pointer that is no address"),
    "stack_overflow": (
        "int many[FAULT ? 40000 : 4];\n"
        "for (uint n = 0; n < (FAULT ? 40000 : 4); ++n) many[n] = n * uint(in[n % 4] + 1);\n"
        "out[i] = many[uint(in[i])] + many[uint(in[i]) + 1];",
        "needs more than its 128 KB of stack for local variables"),
    "division_by_zero": (
        "out[i] = 7 / int(in[i] + (FAULT ? 0 : 1));", "divides an integer by zero"),
}


@pytest.fixture(scope="module")
def crashes(checked_metal):
    return planted.Plants(checked_metal, CRASHES)


@pytest.mark.parametrize("name", CRASHES)
def test_a_crash_is_an_error_and_the_process_goes_on(checked_metal, crashes, name):
    checked_metal.set_checks(False)
    try:
        for _ in range(2):
            found = crashes.run("faulty", name, None)
            assert found.startswith(f"kernel '{name}': {thread(0)} {CRASHES[name][1]}")
            assert crashes.run("clean", name, None) == ""
    finally:
        checked_metal.set_checks(True)
