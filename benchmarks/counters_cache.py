"""Counts what a decode step reads of KV caches: plain, in pages, and of 8-bit integers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from cases import Case, make_inputs
from checks import attention_lowp, check
from torch import Tensor

import torch_flash_mps
from benchmarks.counting import Bars, on_cores, ratio, table
from torch_flash_mps import simulator
from torch_flash_mps.reference import attention_ref

CAPACITY = 1024
SEQLEN = 1000
PAGE_SIZE = 16
# Two KV heads fill a GPU of one core, as in counters_decode.py.
CASES = [
    Case(num_heads_q=2 * group_size, num_heads_kv=2, seqlen_q=rows, seqlen_k=CAPACITY, head_dim=128,
         dtype=torch.float16)
    for group_size, rows in ((1, 1), (4, 1), (8, 1), (8, 8))
]
MOST = 1.02   # bytes read over the least possible
CACHES = ("plain", "paged", "int8", "paged int8")
HEADER = ("shape", "cache", "K + V + Q and the rest", "device bytes read", "distinct")


@dataclass(frozen=True)
class Work:
    """What one call did. `least`: valid keys and values, their scales, Q, lengths, page table."""

    case: Case
    cache: str
    least: int
    counts: dict[str, int]


class Cache:
    """K and V of one shape as a cache of one kind, and the scales of its integers."""

    def __init__(self, kind: str, k: Tensor, v: Tensor) -> None:
        self.options: dict[str, Tensor] = {}
        self.seen = [k, v]
        if "int8" in kind:
            (k, k_scale), (v, v_scale) = map(torch_flash_mps.quantize_kv, (k, v))
            self.seen = [x.float() * scale[..., None] for x, scale in ((k, k_scale), (v, v_scale))]
            self.options |= {"k_scale": k_scale, "v_scale": v_scale}
        self.operands = [k, v]
        self.key_bytes = sum(x.nbytes for x in (k, v, *self.options.values())) // CAPACITY
        self.other_bytes = 0
        if "paged" in kind:
            order = torch.randperm(CAPACITY // PAGE_SIZE)
            self.operands = [in_pages(x, order) for x in self.operands]
            self.options = {name: in_pages(x, order) for name, x in self.options.items()}
            self.options["block_table"] = order.argsort()[None].int()
            self.other_bytes = -(-SEQLEN // PAGE_SIZE) * 4


def in_pages(x: Tensor, order: Tensor) -> Tensor:
    """`[1, Hkv, capacity, ...]` as `[pages, Hkv, page_size, ...]`, page i of it at `order[i]`."""
    return x[0].unflatten(1, (-1, PAGE_SIZE)).transpose(0, 1)[order].contiguous()


def measure(case: Case, kind: str) -> Work:
    """One call in checked mode; raises AssertionError for a wrong result."""
    q, k, v = (x.contiguous() for x in make_inputs(case).operands)
    cache = Cache(kind, k, v)
    seen = [x[:, :, :SEQLEN] for x in cache.seen]
    seqlens = torch.tensor([SEQLEN], dtype=torch.int32)
    options = {name: x.to("mps") for name, x in cache.options.items()}
    with simulator.checks(True), on_cores(1):
        simulator.reset_counters()
        out, _ = torch.ops.flash_mps.attention_with_kvcache(
            *(x.to("mps") for x in (q, *cache.operands)), seqlens_k=seqlens.to("mps"), **options)
        (counts,) = simulator.counters()
    ref, _ = attention_ref(q, *seen)
    check(out, ref, attention_lowp(q, *(x.to(q.dtype) for x in seen)), case_id=f"{case.id} {kind}")
    least = q.nbytes + cache.key_bytes * SEQLEN + seqlens.nbytes + cache.other_bytes
    return Work(case, kind, least, counts)


def row(work: Work) -> tuple[str, ...]:
    group_size = work.case.num_heads_q // work.case.num_heads_kv
    return (
        f"Hq/Hkv {group_size}, Sq {work.case.seqlen_q}", work.cache, f"{work.least:,}",
        ratio(work.counts["device_bytes_read"], work.least),
        ratio(work.counts["device_bytes_read_distinct"], work.least),
    )


def broken_bars(work: Work) -> list[str]:
    bars = Bars()
    bars.check(f"{work.case.id} {work.cache}", "device bytes read",
               work.counts["device_bytes_read"], MOST * work.least)
    return bars.broken


def section() -> tuple[str, list[str]]:
    """The table, and the bars that it breaks."""
    works = [measure(case, kind) for case in CASES for kind in CACHES]
    return (f"B 1, Hkv 2, D 128, float16, {SEQLEN} of {CAPACITY} keys, pages of {PAGE_SIZE}\n\n"
            f"{table(HEADER, [row(work) for work in works], 2)}"), [
                sentence for work in works for sentence in broken_bars(work)]
