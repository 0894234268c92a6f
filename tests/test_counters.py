"""The kernel does the work that its blocks need: the bars of benchmarks/counters.py hold."""

import sys
from dataclasses import replace

import pytest
import torch
from cases import Case

if sys.platform == "darwin":
    pytest.skip("only the simulated device counts", allow_module_level=True)

from benchmarks import counters
from torch_flash_mps import simulator

CASE = Case(num_heads_q=2, num_heads_kv=2, seqlen_q=512, seqlen_k=512, head_dim=64,
            dtype=torch.float16, causal=True)


@pytest.fixture(scope="module")
def works():
    return counters.measure(CASE)


def test_bars(device, works):
    assert counters.broken_bars(works) == []


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
    assert any(expected in sentence for sentence in counters.broken_bars(changed))


def test_blocks_are_counted():
    assert counters.num_blocks(CASE, 1, 1) == 2 * 512 * 513 // 2
    assert counters.num_blocks(CASE, 32, 32) == 2 * 16 * 17 // 2
    assert counters.num_blocks(replace(CASE, causal=False, seqlen_k=33), 32, 32) == 2 * 16 * 2


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
