"""Hidden blocks of a mask do no work: the bars of counters_mask.py hold, and notice a breach."""

import sys
from dataclasses import replace

import pytest

if sys.platform == "darwin":
    pytest.skip("only the simulated device counts", allow_module_level=True)

from benchmarks import counters_mask

NAMES = ("padding", "block-diagonal")


@pytest.fixture(scope="module")
def visits():
    return [one for name in NAMES for one in counters_mask.measure(name)]


@pytest.fixture(scope="module")
def passes():
    return [counters_mask.pre_pass(name, counters_mask.CASE)[1] for name in counters_mask.MASKS]


@pytest.fixture(scope="module")
def steps():
    return [counters_mask.measure_step(name, path)
            for name in counters_mask.MASKS for path in counters_mask.DECODE_CASES]


def test_the_blocks_of_a_mask_with_a_visible_pair_are_visited(device, visits, passes, steps):
    assert counters_mask.broken_bars(visits, passes, steps) == []
    assert len(visits) == len(NAMES) * 2 * 3
    for one in visits:
        assert one.visible < one.strips * (0.3 if one.mask == "block-diagonal" else 0.7)
        assert one.bytes_read < one.bytes_without * 0.7
    for step in steps:
        if step.path == "staged" and step.mask != "random":
            assert step.bytes_read < 0.7 * step.bytes_without
    random = passes[-1]
    assert random.counts["device_bytes_read"] < random.mask_bytes / 3


@pytest.mark.parametrize("index", range(12))
def test_bars_notice_one_strip(visits, index):
    one = visits[index]
    for visited in (one.visited - 1, one.visited + 1):
        (sentence,) = counters_mask.broken_bars([replace(one, visited=visited)], [], [])
        assert "visited strips" in sentence
    (sentence,) = counters_mask.broken_bars(
        [replace(one, bytes_read=one.bytes_without + 1)], [], [])
    assert "distinct bytes read" in sentence


def test_bars_notice_what_the_pass_and_a_decode_move(passes, steps):
    for one in passes:
        for name, most in (("device_bytes_read", one.mask_bytes),
                           ("device_bytes_written", one.table_bytes)):
            changed = replace(one, counts=one.counts | {name: most + 1})
            (sentence,) = counters_mask.broken_bars([], [changed], [])
            assert name.replace("_", " ") in sentence
    for step in steps:
        (sentence,) = counters_mask.broken_bars([], [], [replace(step, bytes_read=step.most + 1)])
        assert "distinct bytes read" in sentence
