"""Ours, PyTorch's and the naive attention, on the same tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

OURS, PYTORCH, NAIVE = (
    "flash_mps::attention", "F.scaled_dot_product_attention", "matmul, softmax, matmul")

Calls = dict[str, Callable[[], Tensor]]


def attention_calls(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Calls:
    """A call of each, by name. Options as those of `F.scaled_dot_product_attention`."""
    grouped = q.shape[1] != k.shape[1]
    return {
        OURS: lambda: torch.ops.flash_mps.attention(q, k, v, enable_gqa=grouped, **options),
        PYTORCH: lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **options),
        NAIVE: lambda: naive(q, k, v, **options),
    }


def naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """What a model writes without a fused kernel: the whole score matrix in memory."""
    group_size = q.shape[1] // k.shape[1]
    if group_size > 1:
        k, v = (x.repeat_interleave(group_size, 1) for x in (k, v))
    scores = (q @ k.transpose(2, 3)) * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    if is_causal:
        above = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(above, -math.inf)
    if attn_mask is not None:
        is_bool = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if is_bool else scores + attn_mask
    return torch.softmax(scores, -1).to(v.dtype) @ v


def pytorch_backend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> str:
    """The backend that `F.scaled_dot_product_attention` of the installed torch would choose."""
    try:
        choice = torch._fused_sdp_choice(
            q, k, v, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1])
    except (AttributeError, NotImplementedError, RuntimeError):
        return "not known"
    return torch.nn.attention.SDPBackend(choice).name
