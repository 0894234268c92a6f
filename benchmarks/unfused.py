"""Device bytes of training without a fused kernel, beside ours.

One rule for both sides: a kernel reads each byte of its operands once and writes each byte of its
results once. For ours the simulated device counts the bytes that a dispatch touched. For the
unfused, matmul, softmax, matmul and their autograd run as ATen ops in the same dtype, and each op
that touches memory (views and allocations do not) counts its tensor arguments and results.

What the rule leaves out on both sides is tiles that are read again: by ours as often as the column
"with re-reads" says, by a tiled matrix product about as often.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from cases import Case
from gradients import NAMES, Operands, case_operands, check_gradients, output_gradients
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.counting import Bars, on_path, table
from torch_flash_mps import simulator
from torch_flash_mps.cli.baselines import naive

CASES = [
    Case(seqlen_q=seqlen, seqlen_k=seqlen, head_dim=64, dtype=torch.float16)
    for seqlen in (256, 512, 1024, 2048)
]
BAR_SEQLEN, BAR_RATIO = 1024, 5
ALLOCATIONS = ("empty", "new_empty")


def distinct_bytes(tensor: Tensor) -> int:
    """Bytes of its elements in memory: a broadcast dimension counts once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride != 0 else min(size, 1)
    return count * tensor.element_size()


class MovedBytes(TorchDispatchMode):
    """Sums the bytes of tensor arguments and results of every ATen op that touches memory."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        result = func(*args, **(kwargs or {}))
        read, written = tensors((args, kwargs)), tensors(result)
        storages = {x.untyped_storage().data_ptr() for x in read}
        # Also ops whose schema does not say so give views, such as _unsafe_view.
        is_view = not func._schema.is_mutable and all(
            x.untyped_storage().data_ptr() in storages for x in written)
        if not is_view and not func.overloadpacket.__name__.startswith(ALLOCATIONS):
            self.total += sum(map(distinct_bytes, read + written))
        return result


def tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


@dataclass(frozen=True)
class Moved:
    """Device bytes of forward and of backward."""

    forward: int
    backward: int

    @property
    def both(self) -> int:
        return self.forward + self.backward


@dataclass(frozen=True)
class Traffic:
    """Ours beside the unfused, on one shape."""

    case: Case
    ours: Moved
    ours_with_rereads: Moved   # every byte as often as a threadgroup reads it
    unfused: Moved

    @property
    def backward_ratio(self) -> float:
        return self.unfused.backward / self.ours.backward

    @property
    def training_ratio(self) -> float:
        return self.unfused.both / self.ours.both


def unfused_moved(operands: Operands, grad_out: Tensor) -> Moved:
    q, k, v = (operands[name].detach().requires_grad_() for name in NAMES[:3])
    with MovedBytes() as moved:
        out = naive(q, k, v)
        forward = moved.total
        torch.autograd.grad(out, (q, k, v), grad_out)
    return Moved(forward, moved.total - forward)


def measure(case: Case) -> Traffic:
    """Counts one shape, on the staged path; raises AssertionError for a wrong gradient."""
    operands = {name: x if x is None else x.contiguous()
                for name, x in case_operands(case, "cpu").items()}
    grad_out, _ = output_gradients(case, "cpu")
    on_device = {name: x if x is None else x.to("mps") for name, x in operands.items()}
    with on_path("staged"), simulator.checks(True):
        simulator.reset_counters()
        check_gradients(on_device, grad_out.to("mps"), case_id=case.id)
        dispatches = simulator.counters()

    def ours(*names: str) -> Moved:
        sums = {"flash_fwd": 0, "flash_bwd": 0}
        for counts in dispatches:
            sums[counts["kernel"][:len("flash_fwd")]] += sum(counts[name] for name in names)
        return Moved(*sums.values())

    return Traffic(case, ours("device_bytes_footprint"),
                   ours("device_bytes_read", "device_bytes_written"),
                   unfused_moved(operands, grad_out))


def broken_bars(traffics: list[Traffic]) -> list[str]:
    bars = Bars()
    for one in traffics:
        if one.case.seqlen_q == BAR_SEQLEN:
            for what, ratio in (("backward", one.backward_ratio),
                                ("forward and backward", one.training_ratio)):
                bars.check(one.case.id, f"bytes of ours over the unfused, {what},",
                           1 / ratio, 1 / BAR_RATIO)
    for before, one in zip(traffics, traffics[1:], strict=False):
        bars.check(one.case.id, f"a smaller share than at S {before.case.seqlen_q}, bytes of ours",
                   1 / one.backward_ratio, 1 / before.backward_ratio)
    return bars.broken


HEADER = (
    "S", "ours, backward", "unfused, backward", "ratio", "ours, forward + backward",
    "unfused, forward + backward", "ratio", "ours with re-reads, backward",
)


def row(one: Traffic) -> tuple[str, ...]:
    return (
        str(one.case.seqlen_q),
        f"{one.ours.backward:,}", f"{one.unfused.backward:,}", f"{one.backward_ratio:.1f}",
        f"{one.ours.both:,}", f"{one.unfused.both:,}", f"{one.training_ratio:.1f}",
        f"{one.ours_with_rereads.backward:,}",
    )


def section() -> tuple[str, list[str]]:
    """The table, and the bars that ours breaks."""
    traffics = list(progress(CASES))
    text = "B 1, Hq 1, D 64, dense, float16, staged path; device bytes\n\n"
    return text + table(HEADER, [row(one) for one in traffics], 1), broken_bars(traffics)


def progress(cases: list[Case]) -> Iterable[Traffic]:
    for case in cases:
        print(f"{case.id} ...", file=sys.stderr)
        yield measure(case)
