"""Dispatches that depend on each other, in serial and concurrent encoders."""

import sys

import pytest
from recording import COUNT, NBYTES, Recording, count_bytes, faults, floats, make_buffer

if sys.platform == "darwin":
    pytest.skip("a Mac has Metal itself", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("metal")


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


def test_HD_04_a_concurrent_encoder_without_a_barrier(metal, copy):
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
