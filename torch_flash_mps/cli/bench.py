"""Times ours, PyTorch's and the naive attention on this machine: a table and a plot.

Nothing is timed whose result is wrong: out and gradients of each are compared with float64 first.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from torch_flash_mps.cli import machine, timing
from torch_flash_mps.cli.baselines import (
    NAIVE,
    OURS,
    PYTORCH,
    Calls,
    attention_calls,
    naive,
    pytorch_backend,
)
from torch_flash_mps.cli.timing import Timing
from torch_flash_mps.interface import explain
from torch_flash_mps.judge import check
from torch_flash_mps.reference import attention_ref

OPS = ("forward", "backward", "decode")
NAMES = (OURS, PYTORCH, NAIVE)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SEQLENS, SIMULATED_SEQLENS = (128, 256, 512, 1024, 2048, 4096), (32, 64, 128)
#: Rows of a long call that are compared with float64, whose score matrix would not fit in memory.
CHECKED_ROWS = 256


@dataclass(frozen=True)
class Point:
    """One row of the table: what each name took, or why it was not timed."""

    op: str
    seqlen: int
    backend: str
    timings: dict[str, Timing] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def cell(self, name: str) -> str:
        return str(self.timings[name]) if name in self.timings else self.failures[name]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--op", action="append", choices=OPS, help="may be repeated; default: all")
    parser.add_argument("--seqlen", type=_count, nargs="+", help="default: "
                        f"{SEQLENS}; on the simulated device {SIMULATED_SEQLENS}")
    parser.add_argument("--batch", type=_count, default=1)
    parser.add_argument("--heads", type=_count, default=8)
    parser.add_argument("--kv-heads", type=_count, default=2)
    parser.add_argument("--head-dim", type=_count, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="float16")
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, default=True,
                        help="forward and backward; a decode step sees all keys")
    parser.add_argument("--repeats", type=_count, default=9, help="timed calls of each")
    parser.add_argument("--warm-up", type=_seconds, default=timing.WARM_UP_SECONDS,
                        metavar="SECONDS", help="calls of each before the timed ones, at least one")
    parser.add_argument("--output", type=_png, default=Path("bench.png"), metavar="FILE.png",
                        help="the plot; the table goes to FILE.md beside it")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text}")
    return seconds


def _png(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".png" or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"expected a file that ends in .png, in a folder that exists, got {text}")
    return path


def run(options: argparse.Namespace) -> int:
    """Measures, prints and plots. Returns the exit status: 1 for a wrong result, 2 if it cannot."""
    missing = machine.find_device()
    if missing is None and importlib.util.find_spec("matplotlib") is None:
        missing = ("the plot needs matplotlib, which is not installed; "
                   "`pip install 'torch_flash_mps[bench]'` brings it")
    missing = missing or _not_supported(options)
    if missing is not None:
        print(f"bench: {missing}", file=sys.stderr)
        return 2
    seqlens = options.seqlen or (SIMULATED_SEQLENS if machine.is_simulated() else SEQLENS)
    points = []
    for op in options.op or OPS:
        for seqlen in seqlens:
            print(f"  {op}, seqlen {seqlen} ...", file=sys.stderr)
            points.append(measure(op, seqlen, options))
    text = report(points, options)
    print(text)
    options.output.with_suffix(".md").write_text(text + "\n")
    from torch_flash_mps.cli import plot  # matplotlib is an extra

    plot.draw(points, title(options), machine.about(), options.output)
    print(f"\nWritten: {options.output} and {options.output.with_suffix('.md')}", file=sys.stderr)
    return int(any(OURS in point.failures for point in points))


def _not_supported(options: argparse.Namespace) -> str | None:
    """Why our op does not take operands of these sizes; None when it does."""
    q, k = (torch.empty(1, heads, 1, options.head_dim, dtype=DTYPES[options.dtype], device="mps")
            for heads in (options.heads, options.kv_heads))
    return explain(q, k, k, enable_gqa=options.heads != options.kv_heads)["reason"]


def measure(op: str, seqlen: int, options: argparse.Namespace) -> Point:
    """Checks each call, then times those whose result is right, taking turns."""
    problem = Problem.random(op, seqlen, options)
    calls, failures = {}, {}
    for name, call in problem.calls().items():
        try:
            problem.check(call, name)
            calls[name] = problem.timed(call)
        except AssertionError as difference:
            print(difference, file=sys.stderr)
            failures[name] = "wrong result"
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            failures[name] = "out of memory"
    with torch.set_grad_enabled(op == "backward"):
        timings = timing.interleaved(calls, machine.synchronize, options.repeats,
                                     warm_up_seconds=options.warm_up)
    return Point(op, seqlen, problem.backend(), timings, failures)


@dataclass(frozen=True)
class Problem:
    """Operands of one call on the device, and how its results are checked."""

    op: str
    q: Tensor
    k: Tensor
    v: Tensor
    is_causal: bool

    @classmethod
    def random(cls, op: str, seqlen: int, options: argparse.Namespace) -> Problem:
        generator = torch.Generator().manual_seed(0)

        def operand(heads: int, rows: int) -> Tensor:
            x = torch.randn(options.batch, heads, rows, options.head_dim, generator=generator)
            return x.to(DTYPES[options.dtype]).to("mps").requires_grad_(op == "backward")

        return cls(op, operand(options.heads, 1 if op == "decode" else seqlen),
                   operand(options.kv_heads, seqlen), operand(options.kv_heads, seqlen),
                   options.causal and op != "decode")

    @property
    def operands(self) -> list[Tensor]:
        return [self.q, self.k, self.v]

    def calls(self) -> Calls:
        return attention_calls(self.q, self.k, self.v, is_causal=self.is_causal)

    def backend(self) -> str:
        return pytorch_backend(self.q, self.k, self.v, self.is_causal)

    def timed(self, call: Callable[[], Tensor]) -> Callable[[], object]:
        """What is timed: the call, or its backward pass alone."""
        if self.op != "backward":
            return call
        out = call()
        grad_out = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, self.operands, grad_out, retain_graph=True)

    def check(self, call: Callable[[], Tensor], name: str) -> None:
        """Raises AssertionError where a result is wrong.

        Compared are all query rows, or `CHECKED_ROWS` of them, the first and the last included; the
        gradients are those of a loss of these rows.
        """
        seqlen = self.q.shape[2]
        chosen = torch.randperm(seqlen, generator=torch.Generator().manual_seed(0))
        rows = torch.cat([chosen[:CHECKED_ROWS], torch.tensor([0, seqlen - 1])]).unique()
        grad_out = torch.zeros(self.q.shape, dtype=self.q.dtype)
        grad_out[:, :, rows] = torch.randn(*self.q.shape[:2], len(rows), self.q.shape[3],
                                           generator=torch.Generator().manual_seed(1)).to(grad_out)
        out = call()
        got = {"out": out.detach()[:, :, rows.to("mps")]}
        if self.op == "backward":
            grads = torch.autograd.grad(out, self.operands, grad_out.to("mps"))
            got |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
        dtype = self.q.dtype
        ref = self._on_cpu(lambda *x, **o: attention_ref(*x, **o)[0], torch.float64, rows, grad_out)
        lowp = self._on_cpu(naive, dtype, rows, grad_out)
        for result, tensor in got.items():
            check(tensor, ref[result], lowp[result], dtype=dtype,
                  case_id=f"{self.op}, seqlen {self.k.shape[2]}, {name}: {result}")

    def _on_cpu(self, attend: Callable[..., Tensor], dtype: torch.dtype, rows: Tensor,
                grad_out: Tensor) -> dict[str, Tensor]:
        """Out for some rows, and with them the gradients, of an attention in plain torch."""
        leaves = [x.detach().cpu().to(dtype).requires_grad_(x.requires_grad) for x in self.operands]
        q, k, v = leaves
        mask = torch.arange(k.shape[2]) <= rows[:, None] if self.is_causal else None
        out = attend(q[:, :, rows], k, v, attn_mask=mask)
        if self.op != "backward":
            return {"out": out}
        grads = torch.autograd.grad(out, leaves, grad_out[:, :, rows].to(dtype))
        return {"out": out, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def title(options: argparse.Namespace) -> str:
    shape = (f"B {options.batch}, Hq {options.heads}, Hkv {options.kv_heads}, "
             f"D {options.head_dim}, {options.dtype}")
    if options.causal and options.op != ["decode"]:
        shape += ", causal but for decode"
    return f"{machine.SIMULATED}\n{shape}" if machine.is_simulated() else shape


def report(points: list[Point], options: argparse.Namespace) -> str:
    """The table in Markdown, with what its numbers are."""
    lines = [*title(options).split("\n"), machine.about(), "",
             f"Median of {options.repeats} calls and quartiles, after {options.warm_up:g} s of "
             "warm-up each; the calls take turns. Backward: that pass alone.", "",
             f"| op | seqlen | {' | '.join(NAMES)} | PyTorch's backend |",
             f"| --- | ---: | {'---: | ' * len(NAMES)}--- |"]
    lines += [f"| {point.op} | {point.seqlen} | {' | '.join(map(point.cell, NAMES))} "
              f"| {point.backend} |" for point in points]
    return "\n".join(lines + ([] if machine.is_simulated() else ["", slower(points)]))


def slower(points: list[Point]) -> str:
    """Where ours is not the fastest."""
    found = [f"{point.op} {point.seqlen} ({name}, {point.timings[OURS].median / other:.2f}×)"
             for point in points if OURS in point.timings
             for name in NAMES[1:] if name in point.timings
             and (other := point.timings[name].median) < point.timings[OURS].median]
    return f"Ours is slower in: {', '.join(found)}." if found else "Ours is slower nowhere."
