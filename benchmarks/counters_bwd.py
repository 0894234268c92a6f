"""Counts the work of our backward, all its kernels together (see counters.py)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from cases import Case
from gradients import case_operands, case_options, check_gradients, output_gradients

from benchmarks.counting import FAMILIES, FRAGMENT, Bars, num_blocks, on_path, ratio, shape_name
from torch_flash_mps import _extension, simulator

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Least:
    """The fewest that one kernel could do with its blocks."""

    blocks: int = 0          # blocks with a visible pair, over all query heads
    strips: int = 0          # the same for 8 rows of the own block: what one simdgroup visits
    strip_products: int = 1  # 8x8 products of one strip
    products: int = 0        # those of all 8x8 tiles with a visible pair: less than any block needs
    bytes_read: int = 0
    bytes_written: int = 0
    exponentials: int = 0    # one a visible pair


@dataclass(frozen=True)
class Pass:
    """What one of the backward's kernels did, over all its dispatches."""

    kernel: str
    block_q: int
    block_k: int
    least: Least
    counts: Counter[str]

    @property
    def block_products(self) -> int:
        """8x8 products of all blocks with a visible pair."""
        own = self.block_k if self.kernel == "flash_bwd_dkv" else self.block_q
        return self.least.blocks * own // FRAGMENT * self.least.strip_products


@dataclass(frozen=True)
class Work:
    """What the backward did on one shape and path."""

    path: str
    case: Case
    passes: tuple[Pass, ...]

    def count(self, name: str) -> int:
        return sum(one.counts[name] for one in self.passes)

    def least(self, name: str) -> int:
        return sum(getattr(one.least, name) for one in self.passes)

    @property
    def threadgroup_bytes(self) -> int:
        return self.count("threadgroup_bytes_read") + self.count("threadgroup_bytes_written")

    @property
    def barriers_per_block(self) -> float:
        return self.count("threadgroup_barriers") / self.least("blocks")


def least_delta(case: Case) -> Least:
    rows = case.batch * case.num_heads_q * case.seqlen_q
    return Least(
        bytes_read=rows * 2 * case.value_dim * case.dtype.itemsize,   # O, dO
        bytes_written=rows * FLOAT_BYTES,
    )


def least_dq(case: Case, block_q: int, block_k: int) -> Least:
    """Q, dO, lse, delta once; K and V that a query block sees, once per query block."""
    width = (case.head_dim + case.value_dim) * case.dtype.itemsize
    rows = case.batch * case.num_heads_q * case.seqlen_q
    fragments = (2 * case.head_dim + case.value_dim) // FRAGMENT      # Q Kᵀ, dS K; dO Vᵀ
    return Least(
        blocks=num_blocks(case, block_q, block_k),
        strips=num_blocks(case, FRAGMENT, block_k),
        strip_products=block_k // FRAGMENT * fragments,
        products=num_blocks(case, FRAGMENT, FRAGMENT) * fragments,
        # One column of blocks is one key.
        bytes_read=rows * (width + 2 * FLOAT_BYTES) + num_blocks(case, block_q, 1) * width,
        bytes_written=rows * case.head_dim * case.dtype.itemsize,
        exponentials=num_blocks(case, 1, 1),
    )


def least_dkv(case: Case, block_q: int, block_k: int) -> Least:
    """K and V once; Q, dO, lse, delta that see a key block, once per key block and query head."""
    width = (case.head_dim + case.value_dim) * case.dtype.itemsize
    keys = case.batch * case.num_heads_kv * case.seqlen_k
    fragments = 2 * (case.head_dim + case.value_dim) // FRAGMENT      # K Qᵀ, dSᵀ Q; Pᵀ dO, V dOᵀ
    return Least(
        blocks=num_blocks(case, block_q, block_k),
        strips=num_blocks(case, block_q, FRAGMENT),
        strip_products=block_q // FRAGMENT * fragments,
        products=num_blocks(case, FRAGMENT, FRAGMENT) * fragments,
        bytes_read=keys * width + num_blocks(case, 1, block_k) * (width + 2 * FLOAT_BYTES),
        bytes_written=keys * width,
        exponentials=num_blocks(case, 1, 1),
    )


def tile(kernel: str, case: Case, path: str) -> tuple[int, int]:
    """block_q and block_k of the table's row for the case."""
    rows = [
        row for row in _extension.extension().tilings()
        if row["op"] == kernel and row["family"] == FAMILIES[path]
        and row["element_bytes"] == case.dtype.itemsize
        and row["max_head_dim"] >= max(case.head_dim, case.value_dim)
    ]
    assert rows[0]["path"] == path, f"expected a {path} row of {kernel}, got {rows[0]}"
    return rows[0]["block_q"], rows[0]["block_k"]


def counts_of(kernel: str, dispatches: list[dict]) -> Counter[str]:
    """The sums over the dispatches of one kernel."""
    sums: Counter[str] = Counter()
    for counts in dispatches:
        if counts["kernel"].startswith(f"{kernel}_"):
            sums.update({name: n for name, n in counts.items() if name != "kernel"})
    return sums


def measure(case: Case) -> list[Work]:
    """Runs the backward on both paths; raises AssertionError for a wrong gradient."""
    operands = {name: x if x is None else x.contiguous()
                for name, x in case_operands(case, "mps").items()}
    grad_out, _ = output_gradients(case, "mps")
    works = []
    for path in FAMILIES:
        with on_path(path), simulator.checks(True):
            simulator.reset_counters()
            check_gradients(operands, grad_out, case_id=f"{case.id} {path}",
                            **case_options(case, "mps"))
            dispatches = simulator.counters()
        dq, dkv = (tile(kernel, case, path) for kernel in ("flash_bwd_dq", "flash_bwd_dkv"))
        leasts = {
            "flash_bwd_delta": (1, 1, least_delta(case)),
            "flash_bwd_dq": (*dq, least_dq(case, *dq)),
            "flash_bwd_dkv": (*dkv, least_dkv(case, *dkv)),
        }
        works.append(Work(path, case, tuple(
            Pass(kernel, *block_and_least, counts_of(kernel, dispatches))
            for kernel, block_and_least in leasts.items())))
    return works


def broken_bars(works: list[Work]) -> list[str]:
    """What the backward on one shape does more of than it may, one sentence each."""
    bars = Bars()
    for work in works:
        who = f"{work.case.id} {work.path}"
        is_staged = work.path == "staged"
        bars.check(who, "8x8 products", work.count("matrix_products"),
                   1.05 * sum(one.block_products for one in work.passes))
        bars.check(who, "barriers per visited block", work.barriers_per_block,
                   2 if is_staged else 0)
        read = "device_bytes_read" if is_staged else "device_bytes_read_distinct"
        for one in work.passes:
            counts, least = one.counts, one.least
            name = f"{who} {one.kernel}"
            # Each simdgroup visits on its own: strips of 8 rows are the finest count of visits.
            visited = counts["matrix_products"] / least.strip_products
            bars.check(name, "visited strips of 8 rows", visited, least.strips, least.strips)
            bars.check(name, read.replace("_", " "), counts[read], 1.1 * least.bytes_read)
            bars.check(name, "device bytes written", counts["device_bytes_written"],
                       least.bytes_written, least.bytes_written)
    return bars.broken


NUM_NAMES = 3   # columns of HEADER that hold no number
HEADER = (
    "shape", "path", "tiles dq, dkv", "8×8 products", "device bytes read",
    "distinct, over threadgroups", "device bytes written", "threadgroup bytes",
    "barriers per block", "exponentials",
)


def row(work: Work) -> tuple[str, ...]:
    """One line of the table; in parentheses, the ratio to the least possible."""
    def counted(name: str, least: str) -> str:
        return ratio(work.count(name), work.least(least))

    return (
        shape_name(work.case),
        work.path,
        ", ".join(f"{one.block_q}×{one.block_k}" for one in work.passes[1:]),
        counted("matrix_products", "products"),
        counted("device_bytes_read", "bytes_read"),
        counted("device_bytes_read_distinct", "bytes_read"),
        counted("device_bytes_written", "bytes_written"),
        f"{work.threadgroup_bytes:,}",
        f"{work.barriers_per_block:.2f}" if work.barriers_per_block else "0",
        counted("exponentials", "exponentials"),
    )


def versions() -> str:
    return f"torch {torch.__version__}"
