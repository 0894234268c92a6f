"""Windows and score modifiers do no work beyond their own: the bars of counters_score.py hold."""

import sys
from dataclasses import replace

import pytest

if sys.platform == "darwin":
    pytest.skip("only the simulated device counts", allow_module_level=True)

from benchmarks import counters_score
from benchmarks.counting import num_blocks

SMALL = [replace(case, seqlen_q=500, seqlen_k=500, head_dim=64, window=window)
         for case, window in zip(counters_score.WINDOW_CASES, ((63, -1), (31, 32)), strict=True)]


@pytest.fixture(scope="module")
def visits():
    return [one for case in SMALL for one in counters_score.window_visits(case)]


def test_blocks_outside_a_window_are_not_visited(device, visits):
    assert counters_score.broken_window_bars(visits) == []
    assert len(visits) == 2 * (2 + 4)
    for one in visits:
        dense = replace(one.case, causal=False, window=(-1, -1))
        assert one.blocks < num_blocks(dense, *one.tile) / 3


@pytest.mark.parametrize("kernel", ["flash_fwd, staged", "flash_fwd, direct",
                                    "flash_bwd_dq, staged", "flash_bwd_dkv, direct"])
def test_window_bars_notice_one_strip_and_one_key(visits, kernel):
    (one,) = (one for one in visits if one.kernel == kernel and one.case == SMALL[0])
    (sentence,) = counters_score.broken_window_bars([replace(one, visited=one.visited + 1)])
    assert "visited strips of 8 rows" in sentence
    (sentence,) = counters_score.broken_window_bars(
        [replace(one, distinct_bytes=one.block_bytes + 256)])
    assert "distinct bytes read" in sentence


@pytest.fixture(scope="module")
def steps():
    return [counters_score.measure_step(counters_score.DECODE_CASES[1], kind)
            for kind in counters_score.DECODE_KINDS]


def test_a_decode_step_reads_the_keys_inside_its_windows(device, steps):
    assert counters_score.broken_step_bars(steps) == []
    assert [step.keys for step in steps] == [256 + 3] * 4
    assert [step.num_splits for step in steps] == [1, 2, 1, 7]


@pytest.mark.parametrize("index", range(4))
def test_step_bars_notice_one_key(steps, index):
    step = steps[index]
    key = 2 * step.case.num_heads_kv * step.case.head_dim * 2
    first = dict(step.passes[0])
    first["device_bytes_read_distinct"] += key
    changed = replace(step, passes=(first, *step.passes[1:]))
    assert any("distinct bytes read" in one for one in counters_score.broken_step_bars([changed]))


@pytest.fixture(scope="module")
def extras():
    options = dict(counters_score.OPTIONS)
    dropout = options.pop("dropout")
    together = {name: value for fields in options.values() for name, value in fields.items()}
    case = replace(counters_score.OPTION_CASE, seqlen_q=100, seqlen_k=100)
    return counters_score.option_extras(case, {"all": together, "dropout": dropout})


def test_score_options_read_their_own_inputs_only(device, extras):
    assert counters_score.broken_option_bars(extras) == []
    kernels = {one.kernel.split(",")[0] for one in extras}
    assert kernels == {"flash_fwd", "flash_bwd_delta", "flash_bwd_dq", "flash_bwd_dkv",
                       "flash_decode"}
    assert any(one.counts["device_bytes_read_distinct"] for one in extras)


@pytest.mark.parametrize("count, expected", (
    ("device_bytes_read_distinct", "more distinct bytes read"),
    ("device_bytes_written", "more device bytes written"),
))
def test_option_bars_notice(extras, count, expected):
    for one in extras:
        changed = replace(one, counts=one.counts | {count: one.most + 1})
        assert any(expected in x for x in counters_score.broken_option_bars([changed]))
