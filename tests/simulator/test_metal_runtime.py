"""Metal's API on the simulated device: work that is right runs."""

import sys

import numpy as np
import pytest
from recording import COUNT, NBYTES, SOURCE, Recording, count_bytes, floats, make_buffer

if sys.platform == "darwin":
    pytest.skip("a Mac has Metal itself", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("metal")


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
