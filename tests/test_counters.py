"""The kernels do the work that their blocks need: the bars of benchmarks/counters.py hold."""

import sys
from dataclasses import replace

import pytest
import torch
from cases import Case

if sys.platform == "darwin":
    pytest.skip("only the simulated device counts", allow_module_level=True)

from benchmarks import (
    bench_attention,
    counters_bwd,
    counters_cache,
    counters_decode,
    counters_fwd,
    occupancy,
    unfused,
)
from benchmarks.counting import num_blocks
from torch_flash_mps import _extension, simulator

CASE = Case(num_heads_q=2, num_heads_kv=2, seqlen_q=512, seqlen_k=512, head_dim=64,
            dtype=torch.float16, causal=True)


@pytest.fixture(scope="module")
def works():
    return counters_fwd.measure(CASE)


def test_bars(device, works):
    assert counters_fwd.broken_bars(works) == []


@pytest.mark.parametrize("kernel, count, factor, expected", (
    ("ours, staged", "matrix_products", 1.06, "8x8 products"),
    ("ours, direct", "matrix_products", 0.99, "visited strips of 8 rows"),
    ("ours, staged", "threadgroup_barriers", 1.5, "barriers per visited K block"),
    ("ours, staged", "device_bytes_read", 1.1, "device bytes read"),
    ("ours, direct", "device_bytes_read_distinct", 1.1, "distinct bytes per threadgroup"),
    ("ours, direct", "device_bytes_written", 2, "device bytes written"),
))
def test_bars_notice(works, kernel, count, factor, expected):
    changed = [
        replace(work, counts=work.counts | {count: int(work.counts[count] * factor)})
        if work.kernel.name == kernel else work
        for work in works
    ]
    assert any(expected in sentence for sentence in counters_fwd.broken_bars(changed))


@pytest.fixture(scope="module")
def backward_works():
    return counters_bwd.measure(CASE)


def test_backward_bars(device, backward_works):
    assert counters_bwd.broken_bars(backward_works) == []


@pytest.mark.parametrize("path, kernel, count, factor, expected", (
    ("staged", "flash_bwd_dq", "matrix_products", 1.2, "8x8 products"),
    ("direct", "flash_bwd_dkv", "matrix_products", 0.99, "visited strips of 8 rows"),
    ("staged", "flash_bwd_dkv", "threadgroup_barriers", 1.5, "barriers per visited block"),
    ("staged", "flash_bwd_dq", "device_bytes_read", 1.2, "device bytes read"),
    ("direct", "flash_bwd_dkv", "device_bytes_read_distinct", 1.2, "device bytes read distinct"),
    ("direct", "flash_bwd_delta", "device_bytes_written", 2, "device bytes written"),
))
def test_backward_bars_notice(backward_works, path, kernel, count, factor, expected):
    def change(one):
        if one.kernel != kernel:
            return one
        return replace(one, counts=one.counts | {count: int(one.counts[count] * factor)})

    changed = [
        replace(work, passes=tuple(map(change, work.passes))) if work.path == path else work
        for work in backward_works
    ]
    assert any(expected in sentence for sentence in counters_bwd.broken_bars(changed))


@pytest.fixture(scope="module")
def traffics():
    return [unfused.measure(case) for case in unfused.CASES[:3]]


def test_backward_moves_less_than_the_unfused(device, traffics):
    assert traffics[-1].case.seqlen_q == unfused.BAR_SEQLEN
    assert unfused.broken_bars(traffics) == []


def test_unfused_bars_notice(traffics):
    last = traffics[-1]
    changed = replace(last, unfused=unfused.Moved(last.unfused.forward, last.ours.backward * 4))
    sentences = unfused.broken_bars([*traffics[:-1], changed])
    assert any("over the unfused, backward" in sentence for sentence in sentences)
    assert any("a smaller share than at S 512" in sentence for sentence in sentences)


def test_moved_bytes_of_a_matmul_softmax_matmul():
    """By hand: q, k, v [4, 2], scores [4, 4], float32. Views and broadcasts move nothing more."""
    q = torch.ones(1, 1, 4, 2)
    with unfused.MovedBytes() as moved:
        torch.softmax(q @ q.mT, -1) @ q
    assert moved.total == 4 * ((8 + 8 + 16) + (16 + 16) + (16 + 8 + 8))
    with unfused.MovedBytes() as moved:
        q.view(8).expand(3, 8).mul(2.0)
    assert moved.total == 4 * (8 + 24)
    with unfused.MovedBytes() as moved:
        torch.empty(4).detach()
    assert moved.total == 0


DECODE_CASE = Case(num_heads_q=8, num_heads_kv=2, seqlen_q=4, seqlen_k=1000, head_dim=64,
                   dtype=torch.float16)


@pytest.fixture(scope="module")
def decode_works():
    return [*counters_decode.measure(DECODE_CASE), counters_decode.measure_split(DECODE_CASE)[0]]


def test_decode_bars(device, decode_works):
    assert counters_decode.broken_bars(decode_works) == []
    assert [work.who for work in decode_works] == ["ours", "PyTorch", "MLX", *["ours"] * 3]
    assert decode_works[-1].num_splits > 1


@pytest.mark.parametrize("index, dispatch, count, factor, expected", (
    (0, 0, "device_bytes_read", 1.03, "no mask: expected device bytes read"),
    (3, 0, "device_bytes_read", 1.03, "padding mask: expected device bytes read"),
    (4, 0, "device_bytes_read", 1.03, "float mask: expected device bytes read"),
    (-1, 0, "device_bytes_written", 2, "extra bytes of a split"),
    (-1, 1, "device_bytes_read", 2, "extra bytes of a split"),
))
def test_decode_bars_notice(decode_works, index, dispatch, count, factor, expected):
    work = decode_works[index]
    passes = [dict(counts) for counts in work.passes]
    passes[dispatch][count] = int(passes[dispatch][count] * factor)
    changed = replace(work, passes=tuple(passes))
    assert any(expected in sentence for sentence in counters_decode.broken_bars([changed]))


def test_the_others_read_keys_once_a_row(decode_works):
    """By hand: 32 rows; each of the 32 simdgroups that share one reads it from Q."""
    case = DECODE_CASE
    rows = case.num_heads_q * case.seqlen_q
    for work in decode_works[1:3]:
        assert work.bytes_read == rows * case.head_dim * 2 * (2 * case.seqlen_k + 32)


def test_every_gpu_is_filled():
    assert occupancy.section()[1] == []


def test_occupancy_bar_notices(monkeypatch):
    monkeypatch.setattr(_extension.extension(), "num_splits", lambda *arguments: 5)
    _, broken = occupancy.section()
    assert "M1, 7 cores, Hkv 1: expected cores without a threadgroup 0, got 2" in broken
    assert not any("M1, 7 cores, Hkv 8" in sentence for sentence in broken)


def test_a_cache_is_read_once(device):
    for kind in counters_cache.CACHES:
        work = counters_cache.measure(counters_cache.CASES[1], kind)
        assert counters_cache.broken_bars(work) == []
        twice = replace(work, least=work.least // 2)
        assert any("device bytes read" in one for one in counters_cache.broken_bars(twice))


def test_overhead_bar_notices(device, monkeypatch):
    case, _ = bench_attention.OVERHEAD["decode"]
    monkeypatch.setitem(bench_attention.OVERHEAD, "decode", (case, 0.0))
    _, broken = counters_decode.overhead_section()
    assert any("host overhead" in sentence for sentence in broken)


def test_blocks_are_counted():
    assert num_blocks(CASE, 1, 1) == 2 * 512 * 513 // 2
    assert num_blocks(CASE, 32, 32) == 2 * 16 * 17 // 2
    assert num_blocks(replace(CASE, causal=False, seqlen_k=33), 32, 32) == 2 * 16 * 2


def test_constant_memory_is_counted_apart(checked):
    source = """
        kernel void add(device float* out [[buffer(0)]], const device float* in [[buffer(1)]],
                        constant float2& numbers [[buffer(2)]],
                        uint i [[thread_position_in_grid]]) {
          out[i] = in[0] + numbers[1];
        }"""
    simulator.reset_counters()
    out = torch.zeros(64)
    simulator.Library(source).kernel("add")(
        out.numpy(), bytes(4), torch.tensor([1.0, 2.0]).numpy().tobytes(),
        grid=(2, 1, 1), threadgroup=(32, 1, 1),
    )
    (counts,) = simulator.counters()
    assert out.eq(2).all()
    assert counts["device_bytes_read"] == 64 * 4
    assert counts["device_bytes_read_distinct"] == 2 * 4
    assert counts["constant_bytes_read"] in (64 * 4, 64 * 8)   # one number, or the vector
