"""Packed sequences for tests: inputs, and what each sequence alone gives, by oracle or by op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from cases import DTYPE_NAMES, Case, poisoned, score_options
from checks import attention_and_lse_lowp, check, check_exact, check_same_bits
from gradients import sinks_slack
from torch import Tensor

from torch_flash_mps.reference import attention_ref

SLACK = 3   # rows behind the last sequence


@dataclass(frozen=True)
class Packed:
    """Lengths of q and k of each sequence, and a case for everything else."""

    seqlens_q: tuple[int, ...]
    seqlens_k: tuple[int, ...]
    case: Case
    is_bottom_right: bool = False

    @property
    def id(self) -> str:
        case = self.case
        parts = [DTYPE_NAMES[case.dtype], f"d{case.head_dim}", f"dv{case.value_dim}"]
        parts += [name for name, value in (
            ("causal", case.causal), ("br", self.is_bottom_right),
            ("window", case.window != (-1, -1)), ("cap", case.softcap),
            (f"alibi.{case.alibi}", case.alibi), ("sinks", case.sinks)) if value]
        return "-".join(parts)


@dataclass(frozen=True)
class Inputs:
    operands: dict[str, Tensor]   # query, key, value[, sinks]
    cu_seqlens: tuple[Tensor, Tensor]
    max_seqlens: tuple[int, int]
    options: dict

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None):
        """Out and lse of the op."""
        return torch.ops.flash_mps.attention_varlen_with_lse(
            query, key, value, *self.cu_seqlens, *self.max_seqlens, sinks=sinks, **self.options)


def make_packed(packed: Packed, device: torch.device | str) -> Inputs:
    """Random operands in poisoned buffers; the slack of all of them is NaN."""
    case, generator = packed.case, torch.Generator().manual_seed(3)
    cu_seqlens = [torch.tensor([0, *accumulate(seqlens)], dtype=torch.int32)
                  for seqlens in (packed.seqlens_q, packed.seqlens_k)]

    def operand(seqlens: tuple[int, ...], heads: int, dim: int) -> Tensor:
        x = torch.randn(sum(seqlens) + SLACK, heads, dim, generator=generator)
        x[sum(seqlens):] = torch.nan
        return poisoned(x.to(case.dtype), device)

    options = score_options(case, device)
    sinks = options.pop("sinks", None)
    operands = {"query": operand(packed.seqlens_q, case.num_heads_q, case.head_dim),
                "key": operand(packed.seqlens_k, case.num_heads_kv, case.head_dim),
                "value": operand(packed.seqlens_k, case.num_heads_kv, case.value_dim)}
    return Inputs(
        operands | ({} if sinks is None else {"sinks": sinks}),
        tuple(x.to(device) for x in cu_seqlens),
        (max(packed.seqlens_q, default=0), max(packed.seqlens_k, default=0)),
        {"is_causal": case.causal, "scale": case.scale,
         "is_bottom_right": packed.is_bottom_right} | options,
    )


def one_by_one(function: Callable, packed: Packed, inputs: Inputs, leaves: dict):
    """Out and lse of each sequence alone, by a function with the arguments of attention_ref."""
    query, key, value, sinks = (leaves.get(x) for x in ("query", "key", "value", "sinks"))
    options = {name: x for name, x in inputs.options.items()
               if name not in ("is_bottom_right", "alibi_slopes")}
    slopes = inputs.options.get("alibi_slopes")
    outs, lses = [], []
    rows = zip(query.split([*packed.seqlens_q, SLACK])[:-1],
               key.split([*packed.seqlens_k, SLACK])[:-1],
               value.split([*packed.seqlens_k, SLACK])[:-1], strict=True)
    for i, one in enumerate(rows):
        q, k, v = (x.transpose(0, 1)[None] for x in one)
        offset = k.size(2) - q.size(2) if packed.is_bottom_right else 0
        own = slopes[i] if slopes is not None and slopes.dim() == 2 else slopes
        if q.size(2) == 0:
            continue
        out, lse = function(q, k, v, sinks=sinks, causal_offset=offset, alibi_slopes=own, **options)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def check_packed(packed: Packed, device: torch.device | str) -> None:
    """Judges out, lse and every gradient, through both, against float64; slack is 0."""
    inputs, total = make_packed(packed, device), sum(packed.seqlens_q)
    dtype, generator = packed.case.dtype, torch.Generator().manual_seed(1)
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.operands.items()}
    out, lse = inputs.attend(**leaves)
    grads = [torch.randn(out.shape, generator=generator).to(dtype),
             torch.randn(lse.shape, generator=generator)]
    grads[0][total:], grads[1][:, total:] = torch.nan, torch.nan
    got = torch.autograd.grad([out, lse], list(leaves.values()), [x.to(device) for x in grads])
    results = []
    for function, to in ((attention_ref, torch.float64), (attention_and_lse_lowp, dtype)):
        own = {name: x.detach().cpu().to(to).requires_grad_() for name, x in leaves.items()}
        ref, ref_lse = one_by_one(function, packed, inputs, own)
        is_seen = torch.isfinite(ref_lse.detach())
        wanted = torch.autograd.grad(
            [ref, ref_lse[is_seen]], list(own.values()),
            [grads[0][:total].to(ref.dtype), grads[1][:, :total][is_seen].to(ref_lse.dtype)])
        results.append((ref.detach(), ref_lse.detach(), wanted))
    (ref, ref_lse, ref_grads), (lowp, _, lowp_grads) = results
    name = packed.id
    check(out[:total], ref, lowp, case_id=name)
    check_exact(lse[:, :total], ref_lse, 2e-5, case_id=f"{name} lse")
    check_exact(out[total:], 0.0, case_id=f"{name} slack of out")
    check_exact(lse[:, total:], -torch.inf, case_id=f"{name} slack of lse")
    for operand, *gradients in zip(leaves, got, ref_grads, lowp_grads, strict=True):
        slack = sinks_slack(grads[0][None, :total]) if operand == "sinks" else 0.0
        check(*gradients, dtype=dtype, case_id=f"{name} {operand}", slack=slack)


def check_as_alone(packed: Packed, device: torch.device | str) -> None:
    """Every bit of out, lse and gradients is that of `attention` on each sequence alone."""
    inputs, total, case = make_packed(packed, device), sum(packed.seqlens_q), packed.case
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(total, case.num_heads_q, case.value_dim, generator=generator),
             torch.randn(case.num_heads_q, total, generator=generator)]
    grads = [grads[0].to(case.dtype).to(device), grads[1].to(device)]

    def alone(q: Tensor, k: Tensor, v: Tensor, *, causal_offset: int, **options):
        return torch.ops.flash_mps.attention_with_lse(
            q, k, v, enable_gqa=True, is_bottom_right=packed.is_bottom_right, **options)

    def run(attend: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.operands.items()}
        out, lse = attend(**leaves)
        results = [out[:total], lse[:, :total]]
        return [*results, *torch.autograd.grad(results, list(leaves.values()), grads)]

    together = run(inputs.attend)
    expected = run(lambda **leaves: one_by_one(alone, packed, inputs, leaves))
    for name, got, one in zip(("out", "lse", *inputs.operands), together, expected, strict=True):
        if name == "sinks":   # summed in another order
            check_exact(got, one, 1e-3 * max(1.0, one.abs().max().item()), packed.id)
        else:
            check_same_bits(got, one, f"{packed.id}, {name}")
