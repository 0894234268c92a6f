"""Counts what the classes of a mask's blocks save, and what they cost (see counters.py)."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from cases import Case, make_inputs
from checks import attention_lowp, check, check_same_bits
from gradients import output_gradients
from torch import Tensor

from benchmarks.counters_bwd import counts_of, least_dkv, least_dq, tile
from benchmarks.counting import FAMILIES, FRAGMENT, Bars, on_cores, on_path, ratio, table
from torch_flash_mps import simulator
from torch_flash_mps.reference import attention_ref

# So small that the op does not classify a mask unless it is given the classes.
CASE = Case(seqlen_q=1024, seqlen_k=1024, head_dim=64, dtype=torch.float16)
DECODE_CASES = {
    name: replace(CASE, num_heads_q=8, num_heads_kv=2, seqlen_q=rows)
    for name, rows in (("direct", 1), ("staged", 9))
}
DOCUMENTS = (1 / 4, 3 / 32, 13 / 32, 1 / 32, 7 / 32)   # of the sequence: multiples of 32 of 1024
PADDING = 2 / 5
BLOCK = 32


def make_mask(name: str, case: Case) -> Tensor:
    """Bool [1, 1, Sq or 1, Sk], True = visible; queries are the last of the sequence."""
    keys = torch.arange(case.seqlen_k)
    if name == "padding":
        return (keys >= int(PADDING * case.seqlen_k))[None, None, None]
    if name == "random":
        generator = torch.Generator().manual_seed(0)
        return torch.rand(1, 1, case.seqlen_q, case.seqlen_k, generator=generator) < 0.5
    ends = (torch.tensor(DOCUMENTS).cumsum(0) * case.seqlen_k).round()
    document = torch.bucketize(keys, ends, right=True)
    return (document[-case.seqlen_q:, None] == document)[None, None]


MASKS = ("padding", "block-diagonal", "random")


def in_blocks(visible: Tensor, rows: int, columns: int) -> Tensor:
    """Which (rows x columns) blocks of [Sq, Sk] have a visible pair."""
    seqlen_q, seqlen_k = visible.shape
    num_q, num_k = -(-seqlen_q // rows), -(-seqlen_k // columns)
    padded = torch.zeros(num_q * rows, num_k * columns, dtype=torch.bool)
    padded[:seqlen_q, :seqlen_k] = visible
    return padded.unflatten(1, (num_k, columns)).unflatten(0, (num_q, rows)).any(3).any(1)


def classified(visible: Tensor) -> Tensor:
    """[Sq, Sk]: whether a pair lies in a block of 32 queries and 32 keys with a visible pair."""
    wide = in_blocks(visible, BLOCK, BLOCK).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return wide[: visible.shape[0], : visible.shape[1]]


@dataclass(frozen=True)
class Visits:
    """What one kernel did with the classes and without. A strip: 8 rows (flash_bwd_dkv: keys)."""

    mask: str
    kernel: str
    tile: tuple[int, int]
    strips: int          # of the score matrix, over all heads
    visible: int         # with a visible pair
    classified: int      # inside blocks of 32 x 32 with a visible pair
    visited: float
    visited_without: float
    bytes_read: int      # distinct device bytes, over threadgroups
    bytes_without: int
    table_bytes: int     # the most that its threadgroups could read of the table


@dataclass(frozen=True)
class PrePass:
    """What the kernel mask_block_classes did."""

    mask: str
    mask_bytes: int
    table_bytes: int
    counts: dict[str, int]


def dispatches(run) -> tuple[tuple[Tensor, ...], list[dict]]:
    simulator.reset_counters()
    results = run()
    return results, simulator.counters()


def pre_pass(name: str, case: Case) -> tuple[Tensor, PrePass]:
    mask = make_mask(name, case).to("mps")
    with simulator.checks(True):
        (classes,), (counts,) = dispatches(
            lambda: (torch.ops.flash_mps.mask_block_classes(mask),))
    expected = torch.ops.flash_mps.mask_block_classes(mask.cpu())
    assert torch.equal(classes.cpu(), expected), f"{name}: wrong classes"
    return classes, PrePass(name, mask.numel(), classes.numel(), counts)


def run_all(case: Case, mask: Tensor, classes: Tensor | None):
    """Out, lse and the gradients of query, key and value."""
    q, k, v = make_inputs(case, "mps").operands
    op = torch.ops.flash_mps
    out, lse = op.attention_with_lse(q, k, v, mask, block_classes=classes)
    grad_out, _ = output_gradients(case, "mps")
    found = op.attention_backward(
        grad_out, None, q, k, v, out, lse, mask, 0.0, False, scale=None, enable_gqa=False,
        window_left=-1, window_right=-1, softcap=0.0, alibi_slopes=None, sinks=None,
        is_bottom_right=False, rng_state=None, block_classes=classes,
        output_mask=[True] * 3 + [False] * 2)
    return out, lse, *found[:3]


def check_results(results, without, case: Case, mask: Tensor, case_id: str) -> None:
    """Raises AssertionError for a result that differs in one bit, or an out that is wrong."""
    for one, other in zip(results, without, strict=True):
        check_same_bits(one, other, case_id)
    operands = [x.cpu() for x in make_inputs(case).operands]
    ref, _ = attention_ref(*operands, attn_mask=mask.cpu())
    check(results[0], ref, attention_lowp(*operands, attn_mask=mask.cpu()), case_id=case_id)


def strips_of(kernel: str, case: Case, block_q: int, block_k: int) -> tuple[int, int, int]:
    """Rows and columns of a strip, and its 8x8 products."""
    if kernel == "flash_bwd_dkv":
        return block_q, FRAGMENT, least_dkv(case, block_q, block_k).strip_products
    if kernel == "flash_bwd_dq":
        return FRAGMENT, block_k, least_dq(case, block_q, block_k).strip_products
    fragments = (case.head_dim + case.value_dim) // FRAGMENT
    return FRAGMENT, block_k, block_k // FRAGMENT * fragments


def measure(name: str, case: Case = CASE) -> Iterator[Visits]:
    """Of forward and backward on both paths; raises AssertionError for a wrong result."""
    mask = make_mask(name, case).to("mps")
    classes, _ = pre_pass(name, case)
    visible = mask[0, 0].cpu().expand(case.seqlen_q, case.seqlen_k)
    for path in FAMILIES:
        with on_path(path), simulator.checks(True):
            results, done = dispatches(lambda: run_all(case, mask, classes))
            without, done_without = dispatches(lambda: run_all(case, mask, None))
        check_results(results, without, case, mask, f"{name} {path}")
        for kernel in ("flash_fwd", "flash_bwd_dq", "flash_bwd_dkv"):
            block_q, block_k = tile(kernel, case, path)
            rows, columns, products = strips_of(kernel, case, block_q, block_k)
            counts = [counts_of(kernel, one) for one in (done, done_without)]
            number = [int(in_blocks(one, rows, columns).sum()) * case.num_heads_q
                      for one in (torch.ones_like(visible), visible, classified(visible))]
            visited = [one["matrix_products"] / products for one in counts]
            read = [one["device_bytes_read_distinct"] for one in counts]
            yield Visits(name, f"{kernel}, {path}", (block_q, block_k), *number, *visited, *read,
                         number_of_entries(kernel, classes, counts[0]))


def number_of_entries(kernel: str, classes: Tensor, counts: Counter[str]) -> int:
    """Of the table that all threadgroups read: a row of it, or a column for every head."""
    entries = classes.size(2) if kernel == "flash_bwd_dkv" else classes.size(3)
    return entries * counts["threadgroups"]


@dataclass(frozen=True)
class Step:
    """What one decode step read, in distinct device bytes."""

    mask: str
    path: str
    keys: int            # that some query sees
    classified: int      # in blocks of 32 that some query sees
    seqlen_k: int
    bytes_read: int
    bytes_without: int
    most: int            # K and V of the blocks, Q, mask and table


def measure_step(name: str, path: str, case: Case | None = None) -> Step:
    case = case or DECODE_CASES[path]
    mask = make_mask(name, case).to("mps")
    classes, _ = pre_pass(name, case)
    q, k, v = (x.contiguous() for x in make_inputs(case, "mps").operands)

    def run(classes: Tensor | None):
        return torch.ops.flash_mps.attention_with_lse(
            q, k, v, mask, enable_gqa=True, block_classes=classes)

    with simulator.checks(True), on_cores(1):
        results, (counts,) = dispatches(lambda: run(classes))
        without, (counts_without,) = dispatches(lambda: run(None))
    check_results(results, without, case, mask, f"{name} decode {path}")
    visible = mask[0, 0].cpu().expand(case.seqlen_q, case.seqlen_k)
    keys, blocks = int(visible.any(0).sum()), int(classified(visible).any(0).sum())
    read_keys = blocks if path == "staged" else keys
    most = (read_keys * (k.nbytes + v.nbytes) // case.seqlen_k + q.nbytes
            + case.num_heads_kv * (mask.numel() + classes.numel()))
    return Step(name, path, keys, blocks, case.seqlen_k, counts["device_bytes_read_distinct"],
                counts_without["device_bytes_read_distinct"], most)


def broken_bars(
    visits: Iterable[Visits], passes: Iterable[PrePass], steps: Iterable[Step]
) -> list[str]:
    bars = Bars()
    for one in visits:
        who = f"{one.mask} {one.kernel}"
        exact = one.visible if one.mask == "block-diagonal" else one.classified
        bars.check(who, "visited strips", one.visited, exact, exact)
        bars.check(who, "visited strips without classes", one.visited_without, one.strips,
                   one.strips)
        # Nothing is saved of a random mask: the classes are read beside all of it.
        cost = one.table_bytes if one.mask == "random" else 0
        bars.check(who, "distinct bytes read", one.bytes_read, one.bytes_without + cost)
    for pre in passes:
        who = f"{pre.mask} mask_block_classes"
        bars.check(who, "device bytes read", pre.counts["device_bytes_read"], pre.mask_bytes)
        bars.check(who, "device bytes written", pre.counts["device_bytes_written"],
                   pre.table_bytes, pre.table_bytes)
    for step in steps:
        bars.check(f"{step.mask} flash_decode, {step.path}", "distinct bytes read",
                   step.bytes_read, step.most)
    return bars.broken


HEADER = ("mask", "kernel", "tile", "strips", "with a visible pair", "visited",
          "distinct bytes read", "without classes")
PASS_HEADER = ("mask", "its bytes", "device bytes read", "device bytes written")
STEP_HEADER = ("mask", "kernel", "keys", "that a query sees", "in blocks that one sees",
               "distinct bytes read", "without classes")


def visits_row(one: Visits) -> tuple[str, ...]:
    return (one.mask, one.kernel, f"{one.tile[0]}×{one.tile[1]}", f"{one.strips:,}",
            f"{one.visible:,}", ratio(one.visited, one.visible), f"{one.bytes_read:,}",
            f"{one.bytes_without:,}")


def pass_row(one: PrePass) -> tuple[str, ...]:
    return (one.mask, f"{one.mask_bytes:,}", f"{one.counts['device_bytes_read']:,}",
            f"{one.counts['device_bytes_written']:,}")


def step_row(one: Step) -> tuple[str, ...]:
    return (one.mask, f"flash_decode, {one.path}", f"{one.seqlen_k:,}", f"{one.keys:,}",
            f"{one.classified:,}", f"{one.bytes_read:,}", f"{one.bytes_without:,}")


def sections() -> dict[str, tuple[str, list[str]]]:
    """The tables by name, each with the bars that ours breaks."""
    visits: list[Visits] = []
    for name in MASKS:
        print(f"{name} ...", file=sys.stderr)
        visits += measure(name)
    passes = [pre_pass(name, CASE)[1] for name in MASKS]
    steps = [measure_step(name, path) for name in MASKS for path in DECODE_CASES]
    shape = f"B 1, Hq 1, S {CASE.seqlen_q}, D {CASE.head_dim}, float16"
    return {
        "masks": (f"{shape}\n\n{table(HEADER, list(map(visits_row, visits)), 3)}",
                  broken_bars(visits, [], [])),
        "mask pass": (f"{shape}\n\n{table(PASS_HEADER, list(map(pass_row, passes)), 1)}",
                      broken_bars([], passes, [])),
        "masks decode": (
            "B 1, Hq 8, Hkv 2, D 64, float16; 1 query (direct), 9 queries (staged)\n\n"
            + table(STEP_HEADER, list(map(step_row, steps)), 2), broken_bars([], [], steps)),
    }
