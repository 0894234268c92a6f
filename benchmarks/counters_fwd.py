"""Counts the work of our forward beside PyTorch's and MLX's own kernels (see counters.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from cases import Case, make_inputs
from checks import attention_lowp, check
from foreign_kernels import TILES, mlx_steel, torch_prefill
from torch import Tensor
from wheels import package_version

import torch_flash_mps
from benchmarks.counting import FAMILIES, FRAGMENT, Bars, num_blocks, on_path, ratio, shape_name
from torch_flash_mps import simulator
from torch_flash_mps.reference import attention_ref


@dataclass(frozen=True)
class Kernel:
    """One implementation on one shape: its tile, and the call that gives its output."""

    name: str
    block_q: int
    block_k: int
    path: str
    run: Callable[[], Tensor]


@dataclass(frozen=True)
class Least:
    """The fewest that any kernel with these query blocks could do."""

    products: int        # 8x8 tiles of S with a visible pair, each for Q Kᵀ and P V
    bytes_read: int      # Q once; K and V that a query block sees, once per query block
    bytes_written: int   # out
    threadgroup_bytes: int   # those K and V written, and what each 8 rows see read back
    exponentials: int    # one a visible pair
    barriers: int        # K and V ready, K and V used up


@dataclass(frozen=True)
class Work:
    """What one kernel did on one shape."""

    kernel: Kernel
    case: Case
    least: Least
    visible_blocks: int  # (block_q x block_k) blocks with a visible pair, over all heads
    visible_strips: int  # the same for blocks of 8 rows: what one simdgroup visits
    counts: dict[str, int]

    @property
    def device_bytes_read(self) -> int:
        return self.counts["device_bytes_read"]

    @property
    def distinct_bytes(self) -> float:
        """Distinct device bytes that a threadgroup reads, on average."""
        return self.counts["device_bytes_read_distinct"] / self.counts["threadgroups"]

    @property
    def threadgroup_bytes(self) -> int:
        return self.counts["threadgroup_bytes_read"] + self.counts["threadgroup_bytes_written"]

    @property
    def barriers_per_block(self) -> float:
        return self.counts["threadgroup_barriers"] / self.visible_blocks

    def products_of(self, blocks: int, rows: int) -> int:
        """8x8 products of so many blocks of `rows` query rows."""
        fragments = (rows // FRAGMENT) * (self.kernel.block_k // FRAGMENT)
        return blocks * fragments * (self.case.head_dim + self.case.value_dim) // FRAGMENT


def least_work(case: Case, block_q: int) -> Least:
    element = torch.empty(0, dtype=case.dtype).element_size()
    width = (case.head_dim + case.value_dim) * element
    heads = case.batch * case.num_heads_q
    kv_bytes = num_blocks(case, block_q, 1) * width   # one column of blocks is one key
    tiles = num_blocks(case, FRAGMENT, FRAGMENT)
    return Least(
        products=tiles * (case.head_dim + case.value_dim) // FRAGMENT,
        bytes_read=heads * case.seqlen_q * case.head_dim * element + kv_bytes,
        bytes_written=heads * case.seqlen_q * case.value_dim * element,
        threadgroup_bytes=kv_bytes + num_blocks(case, FRAGMENT, 1) * width,
        exponentials=num_blocks(case, 1, 1),
        barriers=2,
    )


def our_kernels(
    q: Tensor, k: Tensor, v: Tensor, *, rng_state: Tensor | None = None, **options
) -> Iterable[Kernel]:
    """Ours on both paths; options as the op's. Nothing runs until a kernel's `run` is called."""
    on_device = [x.to("mps") for x in (q, k, v)]
    options = {name: x.to("mps") if isinstance(x, Tensor) else x for name, x in options.items()}
    for path in FAMILIES:
        with on_path(path):
            plan = torch_flash_mps.explain(*on_device, **options)
            assert plan["path"] == path, f"expected the {path} path, got {plan}"
            yield Kernel(
                f"ours, {path}", plan["block_q"], plan["block_k"], path,
                lambda: torch.ops.flash_mps.attention(
                    *on_device, rng_state=rng_state, **options),
            )


def all_kernels(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Iterable[Kernel]:
    """Ours, then the others."""
    yield from our_kernels(q, k, v, is_causal=case.causal)
    others = {"PyTorch": torch_prefill, "MLX": mlx_steel}
    for name, call in others.items():
        yield Kernel(name, *TILES[case.head_dim], "staged",
                     lambda call=call: call(q, k, v, causal=case.causal))


def measure(case: Case, *, only_ours: bool = False) -> list[Work]:
    """Runs every kernel on one shape; raises AssertionError for a wrong result."""
    inputs = make_inputs(case)
    q, k, v = (x.contiguous() for x in inputs.operands)
    ref, _ = attention_ref(q, k, v, **inputs.options)
    lowp = attention_lowp(q, k, v, **inputs.options)
    kernels = our_kernels(q, k, v, **inputs.options) if only_ours else all_kernels(case, q, k, v)
    works = []
    with simulator.checks(True):
        for kernel in kernels:
            simulator.reset_counters()
            out = kernel.run()
            (counts,) = simulator.counters()
            check(out, ref, lowp, case_id=f"{case.id} {kernel.name}")
            works.append(Work(
                kernel, case, least_work(case, kernel.block_q),
                num_blocks(case, kernel.block_q, kernel.block_k),
                num_blocks(case, FRAGMENT, kernel.block_k), counts,
            ))
    return works


def check_visits(bars: Bars, work: Work) -> None:
    """What a kernel does with the blocks that it visits, and that it visits no others."""
    who = f"{work.case.id} {work.kernel.name}"
    products = work.counts["matrix_products"]
    bars.check(who, "8x8 products", products,
               1.05 * work.products_of(work.visible_blocks, work.kernel.block_q))
    # Each simdgroup visits on its own: strips of 8 rows are the finest count of visits.
    visited = products / work.products_of(1, FRAGMENT)
    bars.check(who, "visited strips of 8 rows", visited, work.visible_strips, work.visible_strips)
    written = work.least.bytes_written
    bars.check(who, "device bytes written", work.counts["device_bytes_written"], written, written)
    bars.check(who, "barriers per visited K block", work.barriers_per_block,
               2 if work.kernel.path == "staged" else 0)


def broken_bars(works: list[Work]) -> list[str]:
    """What ours on one shape do more of than they may, one sentence each."""
    by_name = {work.kernel.name: work for work in works}
    staged, direct = by_name["ours, staged"], by_name["ours, direct"]
    bars = Bars()
    for work in (staged, direct):
        check_visits(bars, work)
    bars.check(f"{staged.case.id} ours, staged", "device bytes read", staged.device_bytes_read,
               by_name["PyTorch"].device_bytes_read)
    bars.check(f"{direct.case.id} ours, direct", "distinct bytes per threadgroup",
               direct.distinct_bytes,
               staged.device_bytes_read / staged.counts["threadgroups"])
    return bars.broken


NUM_NAMES = 3   # columns of HEADER that hold no number
HEADER = (
    "shape", "kernel", "tile", "8×8 products", "device bytes read", "distinct per threadgroup",
    "device bytes written", "threadgroup bytes", "barriers per K block", "exponentials",
)


def row(work: Work) -> tuple[str, ...]:
    """One line of the table; in parentheses, the ratio to the least possible."""
    counts, least, kernel = work.counts, work.least, work.kernel
    blocks = -(-work.case.seqlen_q // kernel.block_q) * work.case.batch * work.case.num_heads_q

    return (
        shape_name(work.case),
        kernel.name,
        f"{kernel.block_q}×{kernel.block_k}",
        ratio(counts["matrix_products"], least.products),
        ratio(work.device_bytes_read, least.bytes_read),
        ratio(work.distinct_bytes, least.bytes_read / blocks),
        ratio(counts["device_bytes_written"], least.bytes_written),
        ratio(work.threadgroup_bytes, least.threadgroup_bytes) if work.threadgroup_bytes else "0",
        f"{work.barriers_per_block:.2f} ({work.barriers_per_block / least.barriers:.2f})"
        if work.barriers_per_block else "0",
        ratio(counts["exponentials"], least.exponentials),
    )


def versions() -> str:
    return f"torch {torch.__version__}, MLX {package_version('mlx-metal')}"
