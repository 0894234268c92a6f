"""What the counts of every op share: shapes, paths, blocks of the score matrix, bars, tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from cases import Case

from torch_flash_mps import _extension, _simulator, simulator
from torch_flash_mps.reference import visible_pairs

FRAGMENT = 8
SHAPES = [
    Case(num_heads_q=2, num_heads_kv=2, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=head_dim,
         dtype=torch.float16, causal=causal)
    for seqlen in (512, 1000)
    for head_dim in (64, 128)
    for causal in (False, True)
]
# Apple GPU family of the simulated device that takes the path.
FAMILIES = {"staged": "apple7", "direct": "apple9"}


@contextmanager
def on_path(path: str) -> Iterator[None]:
    """Makes the simulated device one that takes the path."""
    before = _simulator.gpu_family()
    simulator.set_gpu_family(FAMILIES[path])
    try:
        yield
    finally:
        simulator.set_gpu_family(before)


@contextmanager
def on_cores(count: int) -> Iterator[None]:
    """Makes the simulated GPU one of so many cores."""
    before = _extension.extension().gpu_cores()
    simulator.set_gpu_cores(count)
    try:
        yield
    finally:
        simulator.set_gpu_cores(before)


def num_blocks(case: Case, rows: int, columns: int) -> int:
    """Blocks of the score matrix with a visible pair, over all heads of all batches."""
    left, right = case.window
    visible = visible_pairs(case.seqlen_q, case.seqlen_k, is_causal=case.causal, window_left=left,
                            window_right=right)
    padded = torch.zeros(-(-case.seqlen_q // rows) * rows, -(-case.seqlen_k // columns) * columns)
    padded[: case.seqlen_q, : case.seqlen_k] = visible
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax((1, 3))
    return int(blocks.sum()) * case.batch * case.num_heads_q


class Bars:
    """Collects what is outside its bar, one sentence each."""

    def __init__(self) -> None:
        self.broken: list[str] = []

    def check(self, who: str, what: str, found: float, most: float, least: float = 0) -> None:
        if not least <= found <= most:
            expected = f"{most:g}" if least == most else f"at most {most:g}"
            self.broken.append(f"{who}: expected {what} {expected}, got {found:g}")


def shape_name(case: Case) -> str:
    return f"S {case.seqlen_q}, D {case.head_dim}, {'causal' if case.causal else 'dense'}"


def ratio(found: float, fewest: float) -> str:
    """A count, and in parentheses its ratio to the least possible."""
    return f"{found:,.0f} ({found / fewest:.2f})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], num_names: int) -> str:
    """A Markdown table; all columns but the first `num_names` hold numbers."""
    rules = ["---"] * num_names + ["---:"] * (len(header) - num_names)
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rules, *rows))
