"""Counts what windows leave out, and what score options and dropout add (see counters.py)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from cases import Case, make_inputs
from checks import attention_lowp, check
from torch import Tensor

from benchmarks import counters_bwd, counters_fwd
from benchmarks.counting import FRAGMENT, Bars, num_blocks, on_cores, ratio, table
from torch_flash_mps import simulator
from torch_flash_mps.reference import attention_ref, visible_pairs

SEQLEN = 4096
WINDOW_CASES = [
    Case(seqlen_q=SEQLEN, seqlen_k=SEQLEN, head_dim=64, dtype=torch.float16, causal=True,
         window=(255, -1)),
    Case(seqlen_q=SEQLEN, seqlen_k=SEQLEN, head_dim=128, dtype=torch.float16, window=(127, 128)),
]
DECODE_CASES = [
    Case(num_heads_q=8, num_heads_kv=2, seqlen_q=rows, seqlen_k=SEQLEN, head_dim=128,
         dtype=torch.float16, causal=True, window=(255, -1))
    for rows in (1, 4)
]
CACHED = 4000   # keys of the cache that are in use
# Whether K and V are a cache; cores of the GPU; splits, 0 = chosen from the cores.
DECODE_KINDS = {
    "op": (False, 1, 0),
    "op, 8 cores": (False, 8, 0),
    "cache": (True, 1, 1),
    "cache, 7 splits": (True, 1, 7),
}
OPTION_CASE = Case(num_heads_q=2, num_heads_kv=2, seqlen_q=512, seqlen_k=512, head_dim=64,
                   dtype=torch.float16, causal=True)
OPTIONS = {"softcap": {"softcap": 2.0}, "ALiBi": {"alibi": "heads"}, "sinks": {"sinks": True},
           "dropout": {"dropout_p": 0.2}}
# Of a head, by the field of a case.
OWN_NUMBERS = {"softcap": 0, "alibi": 1, "sinks": 1, "dropout_p": 0}
FLOAT_BYTES = 4
MOST = 1.02   # device bytes that a decode step reads over the least possible


@dataclass(frozen=True)
class Visits:
    """Which blocks one kernel visited."""

    case: Case
    kernel: str
    tile: tuple[int, int]
    blocks: int           # with a visible pair
    visited: float        # strips of 8 rows, the finest count: each simdgroup visits on its own
    visible: int          # strips with a visible pair
    distinct_bytes: int   # device bytes, each read once a threadgroup
    block_bytes: int      # of the visible blocks and of the kernel's own operands


def window_visits(case: Case) -> Iterator[Visits]:
    """Of forward and backward on both paths; raises AssertionError for a wrong result."""
    key_bytes = (case.head_dim + case.value_dim) * case.dtype.itemsize
    for work in counters_fwd.measure(case, only_ours=True):
        kernel = work.kernel
        yield Visits(
            case, f"flash_fwd, {kernel.path}", (kernel.block_q, kernel.block_k),
            work.visible_blocks,
            work.counts["matrix_products"] / work.products_of(1, FRAGMENT), work.visible_strips,
            work.counts["device_bytes_read_distinct"],
            work.visible_blocks * kernel.block_k * key_bytes
            + case.num_heads_q * case.seqlen_q * case.head_dim * case.dtype.itemsize,
        )
    for backward in counters_bwd.measure(case):
        for one in backward.passes[1:]:
            is_dkv = one.kernel == "flash_bwd_dkv"
            row_bytes = key_bytes + (2 * FLOAT_BYTES if is_dkv else 0)   # with lse and delta
            own_bytes = key_bytes + (0 if is_dkv else 2 * FLOAT_BYTES)
            yield Visits(
                case, f"{one.kernel}, {backward.path}", (one.block_q, one.block_k),
                one.least.blocks,
                one.counts["matrix_products"] / one.least.strip_products, one.least.strips,
                one.counts["device_bytes_read_distinct"],
                one.least.blocks * (one.block_q if is_dkv else one.block_k) * row_bytes
                + case.num_heads_q * case.seqlen_q * own_bytes,
            )


def broken_window_bars(visits: Iterable[Visits]) -> list[str]:
    bars = Bars()
    for one in visits:
        who = f"{one.case.id} {one.kernel}"
        bars.check(who, "visited strips of 8 rows", one.visited, one.visible)
        bars.check(who, "distinct bytes read", one.distinct_bytes, one.block_bytes)
    return bars.broken


@dataclass(frozen=True)
class Step:
    """What one decode step read of the keys, in one dispatch, or in two when it splits them."""

    case: Case
    kind: str
    keys: int             # that some query sees
    num_splits: int
    least: int            # bytes of those keys and values, and Q and lengths once a split
    passes: tuple[dict[str, int], ...]


def measure_step(case: Case, kind: str) -> Step:
    """One call in checked mode; raises AssertionError for a wrong result."""
    is_cache, cores, num_splits = DECODE_KINDS[kind]
    q, k, v = (x.contiguous() for x in make_inputs(case).operands)
    seqlen_k = CACHED if is_cache else case.seqlen_k
    left, right = case.window
    window = {"window_left": left, "window_right": right}
    with simulator.checks(True), on_cores(cores):
        simulator.reset_counters()
        operands = [x.to("mps") for x in (q, k, v)]
        if is_cache:
            seqlens = torch.tensor([CACHED], dtype=torch.int32, device="mps")
            out, _ = torch.ops.flash_mps.attention_with_kvcache(
                *operands, None, case.causal, seqlens_k=seqlens, num_splits=num_splits, **window)
        else:
            out = torch.ops.flash_mps.attention(
                *operands, is_causal=case.causal, enable_gqa=True, is_bottom_right=True, **window)
        passes = tuple(simulator.counters())
    seen = [x[:, :, :seqlen_k] for x in (k, v)]
    options = {"is_causal": case.causal, "causal_offset": seqlen_k - case.seqlen_q, **window}
    ref, _ = attention_ref(q, *seen, **options)
    check(out, ref, attention_lowp(q, *seen, **options), case_id=f"{case.id} {kind}")
    keys = int(visible_pairs(case.seqlen_q, seqlen_k, **options).any(0).sum())
    splits = passes[0]["threadgroups"] // case.num_heads_kv
    length_bytes = splits * case.num_heads_kv * 4 if is_cache else 0
    return Step(case, kind, keys, splits,
                (k.nbytes + v.nbytes) // case.seqlen_k * keys + splits * q.nbytes + length_bytes,
                passes)


def broken_step_bars(steps: Iterable[Step]) -> list[str]:
    bars = Bars()
    for step in steps:
        who = f"{step.case.id} {step.kind}"
        first = step.passes[0]
        bars.check(who, "distinct bytes read", first["device_bytes_read_distinct"], step.least)
        bars.check(who, "device bytes read", first["device_bytes_read"], MOST * step.least)
        bars.check(who, "dispatches", len(step.passes), *[1 + (step.num_splits > 1)] * 2)
    return bars.broken


@dataclass(frozen=True)
class Extra:
    """What one kernel moves with an option and would not without."""

    option: str
    kernel: str
    most: int             # bytes of the option's own input: of its head, for each threadgroup
    counts: dict[str, int]


def kernel_counts(case: Case) -> dict[str, dict[str, int]]:
    """The counts of every kernel on one shape; raises AssertionError for a wrong result.

    A decode has no dropout: few queries that ask for it go to flash_fwd.
    """
    found = {
        f"flash_fwd, {work.kernel.path}": work.counts
        for work in counters_fwd.measure(case, only_ours=True)
    }
    for backward in counters_bwd.measure(case):
        found |= {f"{one.kernel}, {backward.path}": dict(one.counts) for one in backward.passes}
    if case.dropout_p:
        return found
    few = replace(case, seqlen_q=2, causal=False)
    inputs = make_inputs(few, "mps")
    options = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in inputs.options.items()}
    ref, _ = attention_ref(*inputs.operands, **options)
    for cores in (1, 8):
        with simulator.checks(True), on_cores(cores):
            simulator.reset_counters()
            out = torch.ops.flash_mps.attention(*inputs.operands, **inputs.options)
            passes = simulator.counters()
        check(out, ref, attention_lowp(*inputs.operands, **options), case_id=f"{few.id} {cores}")
        name = "flash_decode" if len(passes) == 1 else "flash_decode, split"
        found |= dict(zip((name, "flash_decode_combine"), passes, strict=False))
    return found


def option_extras(
    case: Case = OPTION_CASE, options: dict[str, dict] | None = None
) -> list[Extra]:
    """Of every kernel. `options`: fields of a case by name; heads are not grouped."""
    without = kernel_counts(case)
    extras = []
    for option, fields in (options or OPTIONS).items():
        numbers = sum(OWN_NUMBERS[field] for field in fields)
        for kernel, counts in kernel_counts(replace(case, **fields)).items():
            more = {name: counts[name] - without[kernel][name]
                    for name in counts if name.startswith("device_bytes")}
            most = numbers * FLOAT_BYTES * counts["threadgroups"]
            extras.append(Extra(option, kernel, most, more))
    return extras


def broken_option_bars(extras: Iterable[Extra]) -> list[str]:
    bars = Bars()
    for one in extras:
        who = f"{one.option} in {one.kernel}"
        bars.check(who, "more distinct bytes read", one.counts["device_bytes_read_distinct"],
                   one.most)
        bars.check(who, "more device bytes written", one.counts["device_bytes_written"], 0)
    return bars.broken


WINDOW_HEADER = ("window", "kernel", "tile", "blocks with a visible pair", "of all blocks",
                 "strips of 8 rows visited", "device bytes read, distinct")
STEP_HEADER = ("queries", "kind", "keys inside the windows", "splits", "their K + V, and Q",
               "device bytes read", "distinct")
OPTION_HEADER = ("kernel", *OPTIONS)


def window_row(one: Visits) -> tuple[str, ...]:
    left, right = one.case.window
    name = f"{left} left, causal" if one.case.causal else f"{left} left, {right} right"
    everything = num_blocks(replace(one.case, causal=False, window=(-1, -1)), *one.tile)
    return (
        f"{name}, D {one.case.head_dim}", one.kernel, f"{one.tile[0]}×{one.tile[1]}",
        f"{one.blocks:,}", f"{everything:,}", ratio(one.visited, one.visible),
        ratio(one.distinct_bytes, one.block_bytes),
    )


def step_row(step: Step) -> tuple[str, ...]:
    first = step.passes[0]
    return (
        str(step.case.seqlen_q), step.kind, str(step.keys), str(step.num_splits),
        f"{step.least:,}", ratio(first["device_bytes_read"], step.least),
        ratio(first["device_bytes_read_distinct"], step.least),
    )


def option_rows(extras: list[Extra]) -> Iterator[tuple[str, ...]]:
    for kernel in dict.fromkeys(one.kernel for one in extras):
        cells = {
            one.option: f"{one.counts['device_bytes_read_distinct']} of {one.most}"
            for one in extras if one.kernel == kernel
        }
        yield kernel, *(cells.get(option, "–") for option in OPTIONS)


def sections() -> dict[str, tuple[str, list[str]]]:
    """The tables by name, each with the bars that ours breaks."""
    visits = []
    for case in WINDOW_CASES:
        print(f"{case.id} ...", file=sys.stderr)
        visits += window_visits(case)
    steps = [measure_step(case, kind) for case in DECODE_CASES for kind in DECODE_KINDS]
    extras = option_extras()
    texts = {
        "windows": (
            f"B 1, Hq 1, S {SEQLEN}, float16",
            table(WINDOW_HEADER, [window_row(one) for one in visits], 3),
            broken_window_bars(visits),
        ),
        "windows decode": (
            f"B 1, Hq 8, Hkv 2, D 128, float16; a window of 256 of {SEQLEN} keys, of {CACHED} in a "
            "cache",
            table(STEP_HEADER, [step_row(step) for step in steps], 2),
            broken_step_bars(steps),
        ),
        "score options": (
            "B 1, Hq 2, S 512, D 64, causal, float16; decode: 2 queries; distinct device bytes "
            "that an option adds, and the most that it may",
            table(OPTION_HEADER, list(option_rows(extras)), 1),
            broken_option_bars(extras),
        ),
    }
    return {name: (f"{of}\n\n{lines}", broken) for name, (of, lines, broken) in texts.items()}
