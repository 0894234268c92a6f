"""Counts the work of packed sequences beside that of each sequence alone (see counters.py)."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from checks import check_same_bits
from torch import Tensor

from benchmarks.counters_bwd import counts_of
from benchmarks.counting import FAMILIES, Bars, on_path, ratio, table
from torch_flash_mps import simulator

LENGTHS = (1, 700, 2, 333, 31, 450, 7, 32, 555, 100, 33, 127, 64, 256, 16, 200)
HEADS_Q, HEADS_KV, HEAD_DIM = 2, 1, 64
KERNELS = ("flash_fwd", "flash_bwd_delta", "flash_bwd_dq", "flash_bwd_dkv")
MOST = 1.05   # 8x8 products over those of the sequences alone


@dataclass(frozen=True)
class Work:
    """What one kernel did for all sequences together, and for one after the other."""

    kernel: str
    path: str
    causal: bool
    num_sequences: int
    dispatches: int
    together: Counter[str]
    alone: Counter[str]


def attend_together(operands: Sequence[Tensor], lengths: Sequence[int], causal: bool) -> Tensor:
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="mps")
    return torch.ops.flash_mps.attention_varlen(
        *operands, cu_seqlens, cu_seqlens, max(lengths), max(lengths), 0.0, causal,
        is_bottom_right=True)


def attend_alone(operands: Sequence[Tensor], lengths: Sequence[int], causal: bool) -> Tensor:
    parts = zip(*(x.split(list(lengths)) for x in operands), strict=True)
    outs = [torch.ops.flash_mps.attention(
        *(x.transpose(0, 1)[None] for x in part), is_causal=causal, enable_gqa=True,
        is_bottom_right=True)[0].transpose(0, 1) for part in parts]
    return torch.cat(outs)


def run(
    attend: Callable[..., Tensor], operands: Sequence[Tensor], grad: Tensor, *arguments
) -> tuple[list[Tensor], list[dict]]:
    """Out and gradients, and what each dispatch counted."""
    leaves = [x.detach().requires_grad_() for x in operands]
    simulator.reset_counters()
    out = attend(leaves, *arguments)
    results = [out, *torch.autograd.grad(out, leaves, grad)]
    return results, simulator.counters()


def measure(lengths: Sequence[int], causal: bool) -> list[Work]:
    """Both ways, in checked mode; raises AssertionError unless every bit is the same."""
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randn(sum(lengths), heads, HEAD_DIM, generator=generator).half().to("mps")
                for heads in (HEADS_Q, HEADS_KV, HEADS_KV)]
    grad = torch.randn(operands[0].shape, generator=generator).half().to("mps")
    works = []
    for path in FAMILIES:
        with on_path(path), simulator.checks(True):
            results, together = run(attend_together, operands, grad, lengths, causal)
            expected, alone = run(attend_alone, operands, grad, lengths, causal)
        for got, other in zip(results, expected, strict=True):
            check_same_bits(got, other, f"packed, {path}")
        works += [
            Work(kernel, path, causal, len(lengths),
                 sum(one["kernel"].startswith(f"{kernel}_") for one in together),
                 counts_of(kernel, together), counts_of(kernel, alone))
            for kernel in KERNELS
        ]
    return works


def broken_bars(works: Iterable[Work]) -> list[str]:
    bars = Bars()
    for work in works:
        who = f"packed {work.kernel}, {work.path}{', causal' if work.causal else ''}"
        bars.check(who, "dispatches", work.dispatches, 1, 1)
        for name, most in (("matrix_products", MOST), ("exponentials", MOST),
                           ("device_bytes_written", 1.0)):
            bars.check(who, name.replace("_", " "), work.together[name], most * work.alone[name])
    return bars.broken


HEADER = ("mask", "kernel", "dispatches", "8×8 products", "device bytes read, distinct",
          "device bytes written", "threadgroups")


def row(work: Work) -> tuple[str, ...]:
    def counted(name: str) -> str:
        return ratio(work.together[name], work.alone[name]) if work.alone[name] else "0"

    return (
        "causal" if work.causal else "dense", f"{work.kernel}, {work.path}", str(work.dispatches),
        counted("matrix_products"), counted("device_bytes_read_distinct"),
        counted("device_bytes_written"), counted("threadgroups"),
    )


def sections() -> dict[str, tuple[str, list[str]]]:
    works = []
    for causal in (False, True):
        print(f"packed, {'causal' if causal else 'dense'} ...", file=sys.stderr)
        works += measure(LENGTHS, causal)
    text = (f"{len(LENGTHS)} sequences of {min(LENGTHS)} to {max(LENGTHS)} tokens, "
            f"{sum(LENGTHS):,} in all, Hq {HEADS_Q}, Hkv {HEADS_KV}, D {HEAD_DIM}, float16; in "
            "parentheses the ratio to the sum of each sequence alone")
    return {"varlen": (f"{text}\n\n{table(HEADER, list(map(row, works)), 2)}", broken_bars(works))}
