"""Counts what our decode reads, beside PyTorch's and MLX's kernels for few query rows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from cases import Case, make_inputs
from checks import attention_lowp, check
from foreign_kernels import NUM_SPLITS, SHARING_GROUP, mlx_vector, torch_decode
from torch import Tensor
from wheels import package_version

import torch_flash_mps
from benchmarks import bench_attention, counters_cache, occupancy
from benchmarks.counting import Bars, on_cores, ratio, table
from torch_flash_mps import simulator
from torch_flash_mps.reference import attention_ref

MASKS = ("no mask", "padding mask", "float mask")
GROUP_SIZES = (1, 4, 8)
ROWS = (1, 4, 8)
PADDING = 3               # keys on the left that the padding mask hides
MLX_ROWS = 32             # most rows of a KV head that MLX gives to these kernels
FLOAT_BYTES = 4

# Two KV heads fill a GPU of one core. An M1 has eight: its keys are split.
BYTES_CASES = [
    Case(num_heads_q=2 * group_size, num_heads_kv=2, seqlen_q=rows, seqlen_k=1000,
         head_dim=head_dim, dtype=torch.float16)
    for head_dim in (64, 128) for group_size in GROUP_SIZES for rows in ROWS
]
SPLIT_CASES = [
    Case(num_heads_q=group_size, seqlen_q=rows, seqlen_k=8192, head_dim=128, dtype=torch.float16)
    for group_size, rows in ((1, 1), (4, 1), (8, 1), (8, 4))
]
SPLIT_CORES = 8


@dataclass(frozen=True)
class Work:
    """What one implementation did on one shape, in one dispatch, or in two when it splits keys."""

    who: str
    case: Case
    mask: str
    least: int            # bytes of K, V, Q and the mask
    num_splits: int
    passes: tuple[dict[str, int], ...]

    @property
    def rows(self) -> int:
        return self.case.batch * self.case.num_heads_q * self.case.seqlen_q

    @property
    def bytes_read(self) -> int:
        """By the pass, or the first of two."""
        return self.passes[0]["device_bytes_read"]

    @property
    def extra_bytes(self) -> int:
        """Partial results that the first of two passes writes and the second reads."""
        if len(self.passes) == 1:
            return 0
        return self.passes[0]["device_bytes_written"] + self.passes[1]["device_bytes_read"]

    @property
    def most_extra_bytes(self) -> int:
        """Each split leaves float32 (m, l, O) of each row, written once and read once."""
        return self.num_splits * self.rows * (self.case.value_dim + 2) * 2 * FLOAT_BYTES


def make_mask(case: Case, mask: str) -> Tensor | None:
    if mask == "padding mask":
        return (torch.arange(case.seqlen_k) >= PADDING).expand(case.batch, 1, 1, -1).contiguous()
    if mask == "float mask":
        return torch.randn(1, case.num_heads_q, 1, case.seqlen_k).to(case.dtype)
    return None


class Problem:
    """One shape with one mask: its operands, and what any result is compared with."""

    def __init__(self, case: Case, mask: str) -> None:
        self.case, self.mask_name = case, mask
        self.operands = [x.contiguous() for x in make_inputs(case).operands]
        self.mask = make_mask(case, mask)
        self.ref, _ = attention_ref(*self.operands, attn_mask=self.mask)
        self.lowp = attention_lowp(*self.operands, attn_mask=self.mask)

    @property
    def rows_of_a_kv_head(self) -> int:
        return self.case.num_heads_q // self.case.num_heads_kv * self.case.seqlen_q

    @property
    def whole_mask(self) -> Tensor | None:
        """The mask with all its dimensions, as other libraries' kernels take it."""
        case = self.case
        shape = (case.batch, case.num_heads_q, case.seqlen_q, case.seqlen_k)
        return None if self.mask is None else self.mask.expand(shape)

    def work(self, who: str, call: Callable[[], Tensor], num_splits: int = 1) -> Work:
        """Runs `call`; raises AssertionError for a wrong result."""
        simulator.reset_counters()
        out = call()
        passes = tuple(simulator.counters())
        check(out, self.ref, self.lowp, case_id=f"{self.case.id} {self.mask_name} {who}")
        least = sum(x.nbytes for x in (*self.operands, self.mask) if x is not None)
        return Work(who, self.case, self.mask_name, least, num_splits, passes)

    def ours(self, cores: int) -> Work:
        q, k, v = (x.to("mps") for x in self.operands)
        options = {
            "attn_mask": None if self.mask is None else self.mask.to("mps"),
            "enable_gqa": self.case.num_heads_q != self.case.num_heads_kv,
        }
        with on_cores(cores):
            plan = torch_flash_mps.explain(q, k, v, **options)
            assert plan["op"] == "flash_decode", f"expected flash_decode, got {plan}"
            return self.work("ours", lambda: torch.ops.flash_mps.attention(q, k, v, **options),
                             plan["num_splits"])

    def others_in_one_pass(self) -> Iterator[Work]:
        for who, kernel in (("PyTorch", torch_decode), ("MLX", mlx_vector)):
            if who == "PyTorch" or self.rows_of_a_kv_head <= MLX_ROWS:
                yield self.work(who, lambda kernel=kernel: kernel(*self.operands, self.whole_mask))

    def others_in_two_passes(self) -> Iterator[Work]:
        yield self.work("PyTorch", lambda: torch_decode(*self.operands, passes=2, is_mended=True),
                        NUM_SPLITS)
        yield self.work("MLX", lambda: mlx_vector(*self.operands, passes=2), NUM_SPLITS)
        if (self.rows_of_a_kv_head, self.case.seqlen_q) == (SHARING_GROUP, 1):
            yield self.work(
                "MLX, sharing", lambda: mlx_vector(*self.operands, passes=2, is_sharing=True),
                NUM_SPLITS)


def measure(case: Case) -> list[Work]:
    """Ours with each mask and the others without, all in one pass."""
    with simulator.checks(True):
        works = []
        for mask in MASKS:
            problem = Problem(case, mask)
            works.append(problem.ours(cores=1))
            if mask == "no mask":
                works += problem.others_in_one_pass()
    return works


def measure_split(case: Case) -> list[Work]:
    """Ours and the others, their keys split."""
    with simulator.checks(True):
        problem = Problem(case, "no mask")
        return [problem.ours(SPLIT_CORES), *problem.others_in_two_passes()]


def broken_bars(works: list[Work]) -> list[str]:
    """What ours reads or leaves more of than it may, one sentence each."""
    bars = Bars()
    for work in works:
        if work.who != "ours":
            continue
        name = f"{work.case.id} {work.mask}"
        if work.num_splits == 1:
            bars.check(name, "device bytes read", work.bytes_read, 1.02 * work.least)
        bars.check(name, "dispatches", len(work.passes), *[1 + (work.num_splits > 1)] * 2)
        bars.check(name, "extra bytes of a split", work.extra_bytes,
                   work.most_extra_bytes if work.num_splits > 1 else 0)
    return bars.broken


def shape_name(case: Case) -> str:
    return f"D {case.head_dim}, Hq/Hkv {case.num_heads_q // case.num_heads_kv}, Sq {case.seqlen_q}"


BYTES_HEADER = ("shape", "K + V + Q", "ours", "ours, padding mask", "ours, float mask", "PyTorch",
                "MLX")
SPLIT_HEADER = ("shape", "kernel", "splits", "threadgroups", "first pass reads", "extra bytes",
                "bar")


def bytes_row(works: list[Work]) -> tuple[str, ...]:
    """One line of the table of bytes read; in parentheses, the ratio to the least possible."""
    columns = [("ours", mask) for mask in MASKS] + [(who, "no mask") for who in ("PyTorch", "MLX")]
    found = {(work.who, work.mask): ratio(work.bytes_read, work.least) for work in works}
    return (shape_name(works[0].case), f"{works[0].least:,}",
            *(found.get(column, "–") for column in columns))


def split_row(work: Work) -> tuple[str, ...]:
    return (
        shape_name(work.case), work.who, str(work.num_splits),
        str(work.passes[0]["threadgroups"]), ratio(work.bytes_read, work.least),
        f"{work.extra_bytes:,}", f"{work.most_extra_bytes:,}",
    )


def progress(cases: list[Case]) -> Iterator[Case]:
    for case in cases:
        print(f"{case.id} ...", file=sys.stderr)
        yield case


def overhead_section() -> tuple[str, list[str]]:
    with simulator.checks(False):
        lines, missed = bench_attention.overhead("decode", "mps", repeats=100)
    return bench_attention.listed(lines), [f"host overhead: {'; '.join(lines)}"] * missed


def sections() -> dict[str, tuple[str, list[str]]]:
    """The tables by name, each with the bars that ours breaks."""
    versions = f"torch {torch.__version__}, MLX {package_version('mlx-metal')}"
    in_one = [measure(case) for case in progress(BYTES_CASES)]
    split = [work for case in progress(SPLIT_CASES) for work in measure_split(case)]
    bytes_text = (f"B 1, Hkv 2, Sk {BYTES_CASES[0].seqlen_k}, float16; device bytes read; "
                  f"{versions}\n\n{table(BYTES_HEADER, map(bytes_row, in_one), 1)}")
    split_text = (f"B 1, Hkv 1, Sk {SPLIT_CASES[0].seqlen_k}, float16, {SPLIT_CORES} cores; "
                  f"{versions}\n\n{table(SPLIT_HEADER, map(split_row, split), 2)}")
    return {
        "counters decode": (bytes_text, broken_bars([work for works in in_one for work in works])),
        "splits": (split_text, broken_bars(split)),
        "caches": counters_cache.section(),
        "occupancy": occupancy.section(),
        "overhead decode": overhead_section(),
    }
