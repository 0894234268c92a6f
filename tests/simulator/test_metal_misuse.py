"""Metal's API on the simulated device: each misuse is reported, its twin is silent."""

import ctypes
import gc
import sys

import numpy as np
import pytest
from recording import COUNT, NBYTES, Recording, count_bytes, faults, floats, make_buffer

if sys.platform == "darwin":
    pytest.skip("a Mac has Metal itself", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("metal")


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
