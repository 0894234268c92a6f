"""Metal's API on the simulated device: work that is right runs, and each misuse is reported."""

import ctypes
import gc
import sys

import numpy as np
import pytest

if sys.platform == "darwin":
    pytest.skip("a Mac has Metal itself", allow_module_level=True)

SOURCE = """
#include <metal_stdlib>
using namespace metal;

constant int kAddend [[function_constant(0)]];
constant bool kTwice [[function_constant(1)]];

kernel void add(device float* out [[buffer(0)]], constant uint& count [[buffer(1)]],
                uint i [[thread_position_in_grid]]) {
  if (i < count) out[i] += kTwice ? 2 * kAddend : kAddend;
}

kernel void copy(device float* out [[buffer(0)]], const device float* in [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) {
  out[i] = in[i];
}

kernel void two_arrays(device float* out [[buffer(0)]], threadgroup float* a [[threadgroup(0)]],
                       threadgroup float* b [[threadgroup(1)]]) {
  a[0] = 1;
  b[0] = 2;
  out[0] = a[0] + b[0];
}

kernel void shared_sum(device float* out [[buffer(0)]],
                       threadgroup float* scratch [[threadgroup(0)]],
                       uint i [[thread_index_in_threadgroup]]) {
  scratch[i] = float(i);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (i == 0) out[0] = scratch[0] + scratch[1] + scratch[2] + scratch[3];
}
"""
COUNT = 8
NBYTES = 4 * COUNT


@pytest.fixture(scope="module")
def metal(simulator):
    """The native module, its checks on."""
    from torch_flash_mps import _simulator

    before = _simulator.checks_enabled()
    _simulator.set_checks(True)
    yield _simulator
    _simulator.set_checks(before)


@pytest.fixture(scope="module")
def library(metal):
    return metal.Library(SOURCE)


@pytest.fixture(scope="module")
def add(library):
    return library.kernel("add", {0: ("int", 3), 1: ("bool", False)})


@pytest.fixture(scope="module")
def copy(library):
    return library.kernel("copy", {0: ("int", 0), 1: ("bool", False)})


@pytest.fixture(scope="module")
def shared_sum(library):
    return library.kernel("shared_sum", {0: ("int", 0), 1: ("bool", False)})


@pytest.fixture(autouse=True)
def no_fault_is_left(metal):
    yield
    left = [fault for fault in iter(metal.take_fault, None)]
    assert left == []


def faults(metal) -> list[str]:
    return list(iter(metal.take_fault, None))


def count_bytes(count: int) -> bytes:
    return np.uint32(count).tobytes()


def make_buffer(metal, values):
    array = np.asarray(values, dtype=np.float32)
    buffer = metal.Buffer(array.nbytes, "numbers")
    buffer.write(array.tobytes())
    return buffer


def floats(buffer) -> np.ndarray:
    return np.frombuffer(buffer.read(), dtype=np.float32)


class Recording:
    """One compute encoder on a command buffer, ready for a dispatch of `add` that is right."""

    def __init__(self, metal, kernel, *, concurrent=False, retained=True):
        self.commands = metal.CommandBuffer(retained=retained)
        self.encoder = self.commands.compute_encoder(concurrent)
        self.numbers = make_buffer(metal, range(COUNT))
        self.encoder.set_pipeline(kernel)
        self.encoder.set_buffer(self.numbers, 0, 0)
        self.encoder.set_bytes(count_bytes(COUNT), 1)

    def dispatch(self, grid=(1, 1, 1), threadgroup=(COUNT, 1, 1)):
        self.encoder.dispatch_threadgroups(grid, threadgroup)

    def finish(self):
        self.encoder.end()
        self.commands.commit()
        self.commands.wait()


def test_a_kernel_runs(metal, library, add):
    assert sorted(library.function_names) == ["add", "copy", "shared_sum", "two_arrays"]
    assert add.max_threads == 1024
    numbers = np.arange(COUNT, dtype=np.float32)
    add(numbers, count_bytes(5), grid=(1, 1, 1), threadgroup=(COUNT, 1, 1))
    assert numbers.tolist() == [3, 4, 5, 6, 7, 5, 6, 7]


def test_function_constants_specialise(library):
    numbers = np.zeros(2, dtype=np.float32)
    twice = library.kernel("add", {0: ("int", 5), 1: ("bool", True)})
    twice(numbers, count_bytes(2), grid=(2, 1, 1), threadgroup=(1, 1, 1))
    assert numbers.tolist() == [10, 10]


def test_preprocessor_macros_reach_the_source(metal):
    source = "kernel void f(device int* out [[buffer(0)]]) { out[0] = VALUE; }"
    number = np.zeros(1, dtype=np.int32)
    kernel = metal.Library(source, macros={"VALUE": "41 + 1"}).kernel("f")
    kernel(number, grid=(1, 1, 1), threadgroup=(1, 1, 1))
    assert number[0] == 42


def test_dispatch_threads_has_a_partial_threadgroup(add):
    numbers = np.zeros(COUNT, dtype=np.float32)
    add(numbers, count_bytes(COUNT), grid=(5, 1, 1), threadgroup=(4, 1, 1), grid_is_threads=True)
    assert numbers.tolist() == [3] * 5 + [0] * 3


def test_a_compile_error_names_the_line_of_the_original(metal):
    wrong = SOURCE.replace("out[i] = in[i];", "out[i] = on[i];")
    line = wrong[:wrong.index("on[i]")].count("\n") + 1
    with pytest.raises(RuntimeError, match=rf"program_source:{line}:\d+: error: .*'on'"):
        metal.Library(wrong)


def test_a_function_that_is_not_there(library):
    with pytest.raises(RuntimeError, match="no function named 'subtract'"):
        library.kernel("subtract")


def test_work_is_not_done_before_somebody_waits(metal, add):
    recording = Recording(metal, add)
    before = floats(recording.numbers).tolist()
    recording.dispatch()
    assert floats(recording.numbers).tolist() == before, "the work ran when it was encoded"
    recording.encoder.end()
    recording.commands.commit()
    assert floats(recording.numbers).tolist() == before, "nobody has waited yet"
    recording.commands.wait()
    assert floats(recording.numbers).tolist() == [value + 3 for value in before]
    assert recording.commands.status == "completed"


def test_command_buffers_run_in_the_order_of_their_commits(metal, add, copy):
    first = Recording(metal, add)
    first.dispatch()
    first.encoder.end()
    target = make_buffer(metal, [0] * COUNT)
    second = metal.CommandBuffer()
    second.copy(first.numbers, 0, target, 0, NBYTES)
    first.commands.commit()
    second.commit()
    second.wait()
    assert floats(target).tolist() == [value + 3 for value in range(COUNT)]


def test_set_bytes_copies_at_once(metal, add):
    recording = Recording(metal, add)
    recording.dispatch()
    recording.encoder.set_bytes(count_bytes(0), 1)
    recording.finish()
    assert floats(recording.numbers)[-1] == COUNT - 1 + 3


def test_fill_and_copy_of_a_blit_encoder(metal):
    source, target = make_buffer(metal, range(COUNT)), make_buffer(metal, [0] * COUNT)
    commands = metal.CommandBuffer()
    commands.copy(source, 8, target, 4, 8)
    commands.fill(source, 0, 4, 0)
    commands.commit()
    commands.wait()
    assert floats(target).tolist() == [0, 2, 3, 0, 0, 0, 0, 0]
    assert floats(source)[0] == 0


def test_new_memory_is_poisoned(metal):
    assert set(metal.Buffer(64).read()) == {0xFF}


def test_statistics_count(metal, add):
    before = metal.stats()
    recording = Recording(metal, add)
    recording.dispatch()
    recording.dispatch()
    recording.finish()
    after = metal.stats()
    gained = {name: after[name] - before[name] for name in after}
    assert gained["dispatches"] == 2
    assert gained["commits"] == gained["command_buffers"] == 1
    assert gained["pipelines_built"] == 0
    assert gained["bytes_allocated"] == NBYTES


def test_counters_name_the_kernel(metal, add):
    metal.reset_counters()
    numbers = np.zeros(COUNT, dtype=np.float32)
    add(numbers, count_bytes(COUNT), grid=(2, 1, 1), threadgroup=(4, 1, 1))
    (counted,) = metal.counters()
    assert counted["kernel"] == "add"
    assert counted["threadgroups"] == 2
    assert counted["device_bytes_written"] == NBYTES


@pytest.mark.parametrize("family, supported", [("apple7", 7), ("apple9", 9), ("apple10", 10)])
def test_the_gpu_family_can_be_chosen(metal, family, supported):
    before = metal.gpu_family()
    metal.set_gpu_family(family)
    assert metal.gpu_family() == f"apple{supported}"
    metal.set_gpu_family(before)


def test_an_unknown_gpu_family_is_refused(metal):
    with pytest.raises(ValueError, match="expected apple7, apple8, apple9 or apple10, found m4"):
        metal.set_gpu_family("m4")


# Each misuse: what is done to a recording whose twin is right, and what the fault says.
def bytes_beyond_4k(metal, recording):
    recording.encoder.set_bytes(bytes(4097), 1)


def slot_31(metal, recording):
    recording.encoder.set_buffer(recording.numbers, 0, 31)


def offset_beyond_the_end(metal, recording):
    recording.encoder.set_buffer(recording.numbers, NBYTES + 4, 0)


def offset_not_aligned(metal, recording):
    recording.encoder.set_buffer(recording.numbers, 2, 0)


def offset_without_a_buffer(metal, recording):
    recording.encoder.set_buffer_offset(0, 7)


def no_pipeline(metal, recording):
    recording.encoder.set_pipeline(None)


def unbound_slot(metal, recording):
    recording.encoder.set_buffer(None, 0, 0)


def second_encoder(metal, recording):
    recording.commands.compute_encoder()


def threadgroup_memory_not_a_multiple_of_16(metal, recording):
    recording.encoder.set_threadgroup_memory(20, 0)


def threadgroup_memory_beyond_32k(metal, recording):
    recording.encoder.set_threadgroup_memory(32784, 0)


MISUSES = {
    bytes_beyond_4k: "setBytes: slot 1: expected 1 to 4096 bytes, found 4097",
    slot_31: "setBuffer: expected a slot from 0 to 30, found 31",
    offset_beyond_the_end: "slot 0: expected an offset inside the buffer 'numbers' of 32 bytes, "
                           "found 36",
    offset_not_aligned: "'out' at buffer slot 0: expected an offset that is a multiple of 4 bytes, "
                        "found 2",
    offset_without_a_buffer: "setBufferOffset: expected a buffer at slot 7, found none",
    no_pipeline: "expected a pipeline from setComputePipelineState, found none",
    unbound_slot: "kernel 'add', argument 'out' at buffer slot 0: expected a buffer or bytes, "
                  "found an unbound slot",
    second_encoder: "expected no open encoder, found one that endEncoding has not closed",
    threadgroup_memory_not_a_multiple_of_16: "expected a multiple of 16 bytes, found 20",
    threadgroup_memory_beyond_32k: "slot 0: expected at most 32768 bytes, found 32784",
}


@pytest.mark.parametrize("misuse", MISUSES, ids=lambda misuse: misuse.__name__)
def test_misuse_is_reported_and_fails_the_command_buffer(metal, add, misuse):
    recording = Recording(metal, add)
    misuse(metal, recording)
    recording.dispatch()
    recording.finish()
    assert MISUSES[misuse] in recording.commands.error
    assert recording.commands.status == "error"
    assert floats(recording.numbers).tolist() == list(range(COUNT)), "a faulty command buffer ran"
    assert any(MISUSES[misuse] in fault for fault in faults(metal))


def test_the_same_without_misuse_is_silent(metal, add):
    recording = Recording(metal, add)
    recording.encoder.set_bytes(bytes(4096), 30)
    recording.encoder.set_threadgroup_memory(32768, 0)
    recording.encoder.set_buffer(recording.numbers, 4, 0)
    recording.encoder.set_bytes(count_bytes(COUNT - 1), 1)
    recording.dispatch()
    recording.finish()
    assert recording.commands.error == ""
    assert floats(recording.numbers).tolist() == [0] + [value + 3 for value in range(1, COUNT)]


@pytest.mark.parametrize("grid, threadgroup, message", [
    ((1, 1, 1), (1025, 1, 1), "expected at most 1024 threads per threadgroup, found 1025"),
    ((1, 1, 1), (32, 33, 1), r"found 1056 \(32, 33, 1\)"),
    ((0, 1, 1), (8, 1, 1), "expected a grid and a threadgroup that are not empty"),
    ((1, 1, 1), (8, 0, 1), "expected a grid and a threadgroup that are not empty"),
])
def test_sizes_that_metal_refuses(add, grid, threadgroup, message):
    numbers = np.zeros(COUNT, dtype=np.float32)
    with pytest.raises(RuntimeError, match=message):
        add(numbers, count_bytes(COUNT), grid=grid, threadgroup=threadgroup)


def test_a_pipeline_can_lower_the_limit_of_threads(library):
    kernel = library.kernel("add", {0: ("int", 1), 1: ("bool", False)}, max_threads=64)
    numbers = np.zeros(COUNT, dtype=np.float32)
    kernel(numbers, count_bytes(COUNT), grid=(1, 1, 1), threadgroup=(64, 1, 1))
    with pytest.raises(RuntimeError, match="expected at most 64 threads per threadgroup, found 65"):
        kernel(numbers, count_bytes(COUNT), grid=(1, 1, 1), threadgroup=(65, 1, 1))


def test_threadgroup_memory_is_asked_for(shared_sum):
    out = np.zeros(1, dtype=np.float32)
    shared_sum(out, grid=(1, 1, 1), threadgroup=(4, 1, 1), threadgroup_memory={0: 16})
    assert out[0] == 6
    with pytest.raises(RuntimeError, match="expected a length from setThreadgroupMemoryLength"):
        shared_sum(out, grid=(1, 1, 1), threadgroup=(4, 1, 1))


def test_threadgroup_memory_of_all_arguments_counts(library):
    kernel = library.kernel("two_arrays", {0: ("int", 0), 1: ("bool", False)})
    out = np.zeros(1, dtype=np.float32)
    size = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
    kernel(out, **size, threadgroup_memory={0: 16384, 1: 16384, 2: 32768})   # slot 2 is not its own
    assert out[0] == 3
    with pytest.raises(RuntimeError, match="expected at most 32768 bytes of threadgroup memory, "
                                           "found 32784"):
        kernel(out, **size, threadgroup_memory={0: 16384, 1: 16400})


def test_encoding_after_the_end(metal, add):
    recording = Recording(metal, add)
    recording.dispatch()
    recording.encoder.end()
    recording.dispatch()
    recording.encoder.end()
    after_dispatch, after_end = faults(metal)
    assert "dispatchThreadgroups: expected an open encoder, found one after" in after_dispatch
    assert "endEncoding: expected an open encoder" in after_end
    recording.commands.commit()
    assert recording.commands.status == "error"


def test_commit_twice(metal, add):
    recording = Recording(metal, add)
    recording.finish()
    recording.commands.commit()
    (fault,) = faults(metal)
    assert "commit: expected a command buffer that is not committed yet" in fault


def test_commit_with_an_open_encoder(metal, add):
    recording = Recording(metal, add)
    recording.dispatch()
    recording.commands.commit()
    recording.commands.wait()
    assert "commit: expected no open encoder" in recording.commands.error
    recording.encoder.end()
    assert len(faults(metal)) == 1


def test_wait_without_commit(metal, add):
    recording = Recording(metal, add)
    recording.encoder.end()
    recording.commands.wait()
    (fault,) = faults(metal)
    assert "waitUntilCompleted: expected a committed command buffer" in fault


def test_a_copy_beyond_the_end(metal):
    source, target = make_buffer(metal, range(COUNT)), make_buffer(metal, [0] * COUNT)
    commands = metal.CommandBuffer()
    commands.copy(source, 4, target, 0, NBYTES)
    commands.commit()
    commands.wait()
    assert "copyFromBuffer (source): expected a range inside the buffer 'numbers'" in commands.error
    assert len(faults(metal)) == 1


@pytest.mark.parametrize("retained", [True, False])
def test_a_buffer_that_was_freed_before_the_work_ran(metal, copy, retained):
    commands = metal.CommandBuffer(retained=retained)
    encoder = commands.compute_encoder()
    encoder.set_pipeline(copy)
    target, source = make_buffer(metal, [0] * COUNT), make_buffer(metal, range(COUNT))
    encoder.set_buffer(target, 0, 0)
    encoder.set_buffer(source, 0, 1)
    encoder.dispatch_threadgroups((1, 1, 1), (COUNT, 1, 1))
    encoder.end()
    del source
    gc.collect()
    commands.commit()
    commands.wait()
    if retained:
        assert floats(target).tolist() == list(range(COUNT))
    else:
        assert "slot 1: the MTLBuffer 'numbers' was deallocated before" in commands.error
        assert len(faults(metal)) == 1


@pytest.mark.parametrize("where, complaint", [(-1, "before its first"), (NBYTES, "after its last"),
                                              (NBYTES - 1, None)])
def test_a_host_that_writes_past_its_buffer(metal, where, complaint):
    buffer = metal.Buffer(NBYTES, "short")
    ctypes.memset(buffer.address + where, 1, 1)
    del buffer
    gc.collect()
    found = faults(metal)
    assert len(found) == (1 if complaint else 0)
    assert all(f"'short' of 32 bytes: something wrote {complaint} byte" in one for one in found)


# Two dispatches of one encoder that touch the same bytes.
def two_dispatches(metal, copy, *, concurrent, barrier=False, offset=0):
    commands = metal.CommandBuffer()
    encoder = commands.compute_encoder(concurrent)
    first, middle, last = (make_buffer(metal, [value] * COUNT) for value in (1, 2, 3))
    encoder.set_pipeline(copy)
    encoder.set_buffer(middle, 0, 0)
    encoder.set_buffer(first, 0, 1)
    encoder.dispatch_threadgroups((1, 1, 1), (COUNT // 2, 1, 1))
    if barrier:
        encoder.barrier([middle] if barrier == "resource" else [])
    encoder.set_buffer(last, 0, 0)
    encoder.set_buffer(middle, offset, 1)
    encoder.dispatch_threadgroups((1, 1, 1), (COUNT // 2, 1, 1))
    encoder.end()
    commands.commit()
    commands.wait()
    return commands, floats(last)[0]


HAZARD = "kernel 'copy' reads 16 bytes that kernel 'copy' of the same encoder also touches"


def test_a_concurrent_encoder_without_a_barrier(metal, copy):
    commands, _ = two_dispatches(metal, copy, concurrent=True)
    assert HAZARD in commands.error
    assert len(faults(metal)) == 1


@pytest.mark.parametrize("how", [{"concurrent": False}, {"concurrent": True, "barrier": "all"},
                                 {"concurrent": True, "barrier": "resource"}])
def test_ordered_dispatches(metal, copy, how):
    commands, value = two_dispatches(metal, copy, **how)
    assert commands.error == ""
    assert value == 1


def test_a_concurrent_encoder_with_disjoint_dispatches(metal, copy):
    commands, value = two_dispatches(metal, copy, concurrent=True, offset=NBYTES // 2)
    assert commands.error == ""
    assert value == 2


def test_a_concurrent_encoder_without_a_barrier_in_fast_mode(metal, copy):
    metal.set_checks(False)
    try:
        commands, _ = two_dispatches(metal, copy, concurrent=True)
    finally:
        metal.set_checks(True)
    assert "and no memoryBarrier lies between them" in commands.error
    assert len(faults(metal)) == 1


def test_a_seed_changes_the_order_of_concurrent_dispatches(metal, add):
    orders = set()
    for seed in range(12):
        commands = metal.CommandBuffer()
        encoder = commands.compute_encoder(concurrent=True)
        encoder.set_pipeline(add)
        encoder.set_bytes(count_bytes(COUNT), 1)
        buffers = [make_buffer(metal, [0] * COUNT) for _ in range(4)]
        for index, buffer in enumerate(buffers):
            encoder.set_buffer(buffer, 0, 0)
            encoder.dispatch_threadgroups((index + 1, 1, 1), (COUNT, 1, 1))
        encoder.end()
        metal.reset_counters()
        metal.set_shuffle_seed(seed)
        commands.commit()
        commands.wait()
        metal.set_shuffle_seed(None)
        assert commands.error == ""
        orders.add(tuple(counted["threadgroups"] for counted in metal.counters()))
    assert len(orders) > 1


def test_a_fault_of_a_kernel_becomes_the_command_buffers_error(metal, add):
    recording = Recording(metal, add)
    recording.encoder.set_bytes(count_bytes(COUNT + 1), 1)
    recording.encoder.dispatch_threadgroups((1, 1, 1), (COUNT + 1, 1, 1))
    recording.finish()
    assert recording.commands.status == "error"
    assert "add" in recording.commands.error and "slot 0" in recording.commands.error
    assert len(faults(metal)) == 1
