"""Packed sequences do the work of each alone: the bars of counters_varlen.py hold."""

import sys
from collections import Counter
from dataclasses import replace

import pytest

if sys.platform == "darwin":
    pytest.skip("only the simulated device counts", allow_module_level=True)

from benchmarks import counters_varlen

SMALL = (1, 90, 2, 33, 31, 64, 7, 32, 16)


@pytest.fixture(scope="module")
def works():
    return counters_varlen.measure(SMALL, causal=True)


def test_packed_sequences_do_the_work_of_each_alone(device, works):
    assert counters_varlen.broken_bars(works) == []
    assert [work.kernel for work in works] == [*counters_varlen.KERNELS] * 2
    assert all(work.together["matrix_products"] > 0 for work in works if "delta" not in work.kernel)


@pytest.mark.parametrize("count, sentence", [
    ("matrix_products", "expected matrix products"),
    ("exponentials", "expected exponentials"),
    ("device_bytes_written", "expected device bytes written"),
])
def test_bars_notice(works, count, sentence):
    work = works[0]
    more = Counter(work.together) + Counter({count: work.alone[count] // 10})
    (found,) = counters_varlen.broken_bars([replace(work, together=more)])
    assert sentence in found


def test_bars_notice_a_launch_for_each(works):
    (found,) = counters_varlen.broken_bars([replace(works[0], dispatches=9)])
    assert "expected dispatches 1, got 9" in found
