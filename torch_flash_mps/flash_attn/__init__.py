"""The functions of the flash_attn package (signatures of its version 2.8) on `torch.ops.flash_mps`.

Layout is ``[batch, seqlen, num_heads, head_dim]``, where `torch_flash_mps.attention` takes
``[batch, num_heads, seqlen, head_dim]``. ``causal=True`` is aligned bottom-right: query i sees the
keys j <= i + seqlen_k - seqlen_q, so that the last query sees every key. Grouped heads need no
flag: query head h reads KV head ``h // (num_heads_q / num_heads_kv)``. Dtypes: float32, float16,
bfloat16, on the mps device or the CPU.

``window_size=(left, right)``: query i sees the keys from i + seqlen_k - seqlen_q - left to
i + seqlen_k - seqlen_q + right, -1 is unlimited; with `causal` no key after its own position.
``softcap``: scores become softcap · tanh(scores / softcap), 0 is off. ``alibi_slopes``: float32 or
q's dtype, ``[num_heads_q]`` or ``[batch, num_heads_q]``; adds -slope · abs(i + seqlen_k - seqlen_q
- j). ``dropout_p``: as in `torch_flash_mps.attention`.

The varlen functions take packed sequences (`varlen`), to which `bert_padding` leads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_flash_mps._extension import extension
from torch_flash_mps._flash_attn_args import check_layout, score_options
from torch_flash_mps.flash_attn import bert_padding as bert_padding
from torch_flash_mps.flash_attn._install import install, uninstall
from torch_flash_mps.flash_attn.varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from torch_flash_mps.kv_cache import flash_attn_with_kvcache

__all__ = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func",
           "flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func",
           "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache", "install", "uninstall"]

def _attend(
    name: str, q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float | None,
    causal: bool, window_size: tuple[int, int], softcap: float, alibi_slopes: Tensor | None,
    return_attn_probs: bool,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    extension()
    check_layout(name, q=q, k=k, v=v)
    op = (torch.ops.flash_mps.attention_with_lse if return_attn_probs
          else torch.ops.flash_mps.attention)
    result = op(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, dropout_p, causal,
        scale=softmax_scale, enable_gqa=True, is_bottom_right=True,
        **score_options(window_size, softcap, alibi_slopes),
    )
    if not return_attn_probs:
        return result.transpose(1, 2)
    out, lse = result
    return out.transpose(1, 2), lse, q.new_empty(0)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """softmax(q kᵀ · scale) v, differentiable.

    Args:
        q: ``[batch, seqlen_q, num_heads_q, head_dim]``.
        k: ``[batch, seqlen_k, num_heads_kv, head_dim]``.
        v: ``[batch, seqlen_k, num_heads_kv, head_dim_v]``.
        dropout_p, window_size, softcap, alibi_slopes: see the module.
        softmax_scale: factor of the scores; None means ``1 / sqrt(head_dim)``.
        causal: bottom-right, see the module. A query that sees no key gives 0.
        deterministic: accepted; the backward pass always is.
        return_attn_probs: also return the log-sum-exp and what flash_attn calls S_dmask.

    Returns:
        ``[batch, seqlen_q, num_heads_q, head_dim_v]``, or with `return_attn_probs` that, the
        natural log-sum-exp of the scores, float32 ``[batch, num_heads_q, seqlen_q]``, which
        carries gradients, and an empty tensor: probabilities are never kept, and without dropout
        flash_attn returns none either.

    Raises:
        ValueError: ranks or head counts that do not fit the layout.
        RuntimeError: any other input that does not fit.

    Example:
        >>> import torch
        >>> from torch_flash_mps.flash_attn import flash_attn_func
        >>> q, k, v = torch.ones(1, 3, 4, 8), torch.ones(1, 5, 2, 8), torch.ones(1, 5, 2, 8)
        >>> flash_attn_func(q, k, v, causal=True).shape
        torch.Size([1, 3, 4, 8])
    """
    return _attend("flash_attn_func", q, k, v, dropout_p, softmax_scale, causal, window_size,
                   softcap, alibi_slopes, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """`flash_attn_func` of k and v in one tensor, ``[batch, seqlen_k, 2, num_heads_kv, head_dim]``.

    Example:
        >>> import torch
        >>> from torch_flash_mps.flash_attn import flash_attn_kvpacked_func
        >>> flash_attn_kvpacked_func(torch.ones(1, 3, 4, 8), torch.ones(1, 5, 2, 2, 8)).shape
        torch.Size([1, 3, 4, 8])
    """
    k, v = _unpack("flash_attn_kvpacked_func", "kv", kv, 2)
    return _attend("flash_attn_kvpacked_func", q, k, v, dropout_p, softmax_scale, causal,
                   window_size, softcap, alibi_slopes, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """`flash_attn_func` of q, k and v in one tensor, ``[batch, seqlen, 3, num_heads, head_dim]``.

    Example:
        >>> import torch
        >>> from torch_flash_mps.flash_attn import flash_attn_qkvpacked_func
        >>> flash_attn_qkvpacked_func(torch.ones(1, 5, 3, 2, 8), causal=True).shape
        torch.Size([1, 5, 2, 8])
    """
    q, k, v = _unpack("flash_attn_qkvpacked_func", "qkv", qkv, 3)
    return _attend("flash_attn_qkvpacked_func", q, k, v, dropout_p, softmax_scale, causal,
                   window_size, softcap, alibi_slopes, return_attn_probs)


def _unpack(name: str, operand: str, packed: Tensor, count: int) -> tuple[Tensor, ...]:
    if packed.dim() != 5 or packed.size(2) != count:
        raise ValueError(
            f"{name}: expected {operand} of shape [batch, seqlen, {count}, num_heads, head_dim], "
            f"got {tuple(packed.shape)}"
        )
    return packed.unbind(2)
