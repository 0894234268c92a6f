"""The table of options in README.md: which of them each entry point takes, by trying.

    python tests/options_table.py            # prints it
    python tests/options_table.py --write    # puts it into README.md
"""

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from cases import DTYPES, RNG_STATE
from generated_table import GeneratedTable, markdown
from support_table import README
from torch import Tensor

SEQLENS_K = [37, 24]   # of a cache, and of packed keys
TOLERANCE = {torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 2e-1}


@dataclass(frozen=True)
class Problem:
    """Random operands on the CPU; sizes as in the docs, two batch entries."""

    dtype: torch.dtype
    seqlen_q: int = 3
    num_heads: tuple[int, int] = (2, 2)
    head_dims: tuple[int, int] = (16, 16)
    is_packed: bool = False

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(len(shape) + sum(shape))
        return torch.randn(shape, generator=generator).to(dtype or self.dtype)

    def operands(self) -> list[Tensor]:
        (heads_q, heads_kv), (dim, dim_v) = self.num_heads, self.head_dims
        sizes = ((heads_q, self.seqlen_q, dim), (heads_kv, max(SEQLENS_K), dim),
                 (heads_kv, max(SEQLENS_K), dim_v))
        if self.is_packed:
            return [self.randn(2 * seqlen, heads, width) for heads, seqlen, width in sizes]
        return [self.randn(2, *size) for size in sizes]

    def mask(self, dtype: torch.dtype) -> Tensor:
        bias = self.randn(self.seqlen_q, max(SEQLENS_K), dtype=torch.float32)
        return bias > 0 if dtype == torch.bool else bias.to(dtype)


#: What an option is: of a problem, sizes to change and arguments of the op.
Option = tuple[dict[str, Any], Callable[[Problem], dict[str, Any]]]


def _argument(**options: Any) -> Option:
    return {}, lambda problem: options


OPTIONS: dict[str, Option] = {
    "`is_causal`": _argument(is_causal=True),
    "`is_bottom_right`": _argument(is_causal=True, is_bottom_right=True),
    "`scale`": _argument(scale=0.3),
    "`enable_gqa`": ({"num_heads": (6, 2)}, lambda problem: {"enable_gqa": True}),
    "`head_dim_v` ≠ `head_dim`": ({"head_dims": (16, 24)}, lambda problem: {}),
    "`head_dim` 576, `head_dim_v` 512": ({"head_dims": (576, 512)}, lambda problem: {}),
    "bool `attn_mask`": ({}, lambda problem: {"attn_mask": problem.mask(torch.bool)}),
    "float `attn_mask`": ({}, lambda problem: {"attn_mask": problem.mask(problem.dtype)}),
    "float32 `attn_mask`": ({}, lambda problem: {"attn_mask": problem.mask(torch.float32)}),
    "`window_left`, `window_right`": _argument(window_left=4, window_right=2),
    "`softcap`": _argument(softcap=1.5),
    "`alibi_slopes` [Hq]": _argument(alibi_slopes=torch.tensor([0.1, 0.4])),
    "`alibi_slopes` [B, Hq]": _argument(
        alibi_slopes=torch.tensor([[0.1, 0.4], [0.3, 0.2]])),
    "`sinks`": _argument(sinks=torch.tensor([0.5, -1.0])),
    "`dropout_p`": _argument(dropout_p=0.3, rng_state=RNG_STATE),
}


@dataclass(frozen=True)
class EntryPoint:
    """One column: an op, how it is called, and what it does without being asked."""

    op: str
    sizes: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    implied: tuple[str, ...] = ()
    has_backward: bool = False


CU_SEQLENS_K = torch.tensor([0, SEQLENS_K[0], sum(SEQLENS_K)], dtype=torch.int32)
CACHE = {"seqlens_k": torch.tensor(SEQLENS_K, dtype=torch.int32)}
ENTRY_POINTS = {
    "forward": EntryPoint("attention_with_lse", {"seqlen_q": 20}),
    "backward": EntryPoint("attention_with_lse", {"seqlen_q": 20}, has_backward=True),
    "up to 16 queries": EntryPoint("attention_with_lse"),
    "KV cache": EntryPoint(
        "attention_with_kvcache", {}, CACHE, ("enable_gqa", "is_bottom_right")),
    "packed": EntryPoint(
        "attention_varlen_with_lse", {"seqlen_q": 20, "is_packed": True},
        {"cu_seqlens_q": torch.tensor([0, 12, 33], dtype=torch.int32),
         "cu_seqlens_k": CU_SEQLENS_K, "max_seqlen_q": 21, "max_seqlen_k": max(SEQLENS_K)},
        ("enable_gqa",), has_backward=True),
}


def _results(
    entry: EntryPoint, problem: Problem, arguments: dict[str, Any], place: str
) -> list[Tensor]:
    """Out, lse and, of an entry point with a backward, the gradients; on the CPU."""
    def put(value: Any) -> Any:
        return value.to(place) if isinstance(value, Tensor) and value is not RNG_STATE else value

    arguments = {name: put(value) for name, value in arguments.items()}
    leaves = [x.to(place).requires_grad_(entry.has_backward) for x in problem.operands()]
    for name in ("attn_mask", "sinks"):
        tensor = arguments.get(name)
        if entry.has_backward and tensor is not None and tensor.is_floating_point():
            arguments[name] = tensor.clone().requires_grad_()
            leaves.append(arguments[name])
    results = list(getattr(torch.ops.flash_mps, entry.op)(*leaves[:3], **arguments))
    if entry.has_backward:
        results += torch.autograd.grad(results[0].float().square().sum(), leaves)
    return [x.detach().cpu().float() for x in results]


def _answer(entry: EntryPoint, option: Option, dtype: torch.dtype) -> str:
    """yes: kernels and plain PyTorch agree; no: the op refuses; –: it has no such argument."""
    sizes, make = option
    problem = Problem(dtype, **(entry.sizes | sizes))
    arguments = make(problem)
    wanted = {name for name in arguments if name not in entry.implied}
    schema = getattr(torch.ops.flash_mps, entry.op).default._schema
    if not wanted <= {argument.name for argument in schema.arguments}:
        return "–"
    arguments = entry.arguments | {name: arguments[name] for name in wanted}
    try:
        got, expected = (_results(entry, problem, arguments, place) for place in ("mps", "cpu"))
    except RuntimeError:
        return "no"
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    return "yes"


def options_table() -> str:
    """The table as Markdown: one row for each option, one column for each entry point.

    A row is tried in one dtype, the rows by turns: all would build three times as many kernels.
    """
    rows = [[name, *(_answer(entry, option, dtype) for entry in ENTRY_POINTS.values())]
            for (name, option), dtype in zip(OPTIONS.items(), itertools.cycle(DTYPES))]
    return markdown(["", *ENTRY_POINTS], *rows)


TABLE = GeneratedTable(README, "options table", options_table)

if __name__ == "__main__":
    if sys.platform != "darwin":
        import torch_flash_mps.simulator  # noqa: F401
    TABLE.main(__doc__.splitlines()[0])
