"""Packed sequences, as the flash_attn package takes them.

``q [total_q, num_heads_q, head_dim]``, ``k``, ``v [total_k, num_heads_kv, head_dim]``; sequence i
holds the rows ``cu_seqlens[i]`` to ``cu_seqlens[i + 1] - 1``. Options as in
`torch_flash_mps.flash_attn`, bottom-right in each sequence.
"""

from __future__ import annotations

from torch import Tensor

from torch_flash_mps._flash_attn_args import score_options
from torch_flash_mps.varlen import attention_varlen

__all__ = ["flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func",
           "flash_attn_varlen_qkvpacked_func"]


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Attention within each of several sequences, one launch for all of them; differentiable.

    Args:
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as in
            `torch_flash_mps.attention_varlen`.
        alibi_slopes: ``[num_heads_q]`` or ``[num_sequences, num_heads_q]``.
        block_table: a cache in pages; use `flash_attn_with_kvcache`.

    Returns:
        ``[total_q, num_heads_q, head_dim_v]``, or with `return_attn_probs` that, the natural
        log-sum-exp, float32 ``[num_heads_q, total_q]``, which carries gradients, and an empty
        tensor.

    Raises:
        NotImplementedError: with a block_table.
        RuntimeError: inputs that do not fit.

    Example:
        >>> import torch
        >>> from torch_flash_mps.flash_attn import flash_attn_varlen_func
        >>> q, lengths = torch.ones(7, 2, 8), torch.tensor([0, 3, 7], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, q, q, lengths, lengths, 4, 4, causal=True).shape
        torch.Size([7, 2, 8])
    """
    if block_table is not None:
        raise NotImplementedError(
            "flash_attn_varlen_func: expected no block_table, got one of shape "
            f"{tuple(block_table.shape)}; flash_attn_with_kvcache reads a cache in pages"
        )
    result = attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=dropout_p,
        is_causal=causal, scale=softmax_scale, is_bottom_right=True, return_lse=return_attn_probs,
        **score_options(window_size, softcap, alibi_slopes),
    )
    return (*result, q.new_empty(0)) if isinstance(result, tuple) else result


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """`flash_attn_varlen_func` of k and v in one tensor, ``[total_k, 2, num_heads_kv, head_dim]``.

    Example:
        >>> import torch
        >>> from torch_flash_mps.flash_attn import flash_attn_varlen_kvpacked_func
        >>> q, kv, lengths = torch.ones(7, 2, 8), torch.ones(7, 2, 2, 8), torch.tensor([0, 3, 7])
        >>> flash_attn_varlen_kvpacked_func(q, kv, lengths, lengths, 4, 4).shape
        torch.Size([7, 2, 8])
    """
    k, v = _unpack("flash_attn_varlen_kvpacked_func", "kv", kv, 2)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """`flash_attn_varlen_func` of q, k and v in one tensor, ``[total, 3, num_heads, head_dim]``.

    Example:
        >>> import torch
        >>> from torch_flash_mps.flash_attn import flash_attn_varlen_qkvpacked_func
        >>> lengths = torch.tensor([0, 3, 7])
        >>> flash_attn_varlen_qkvpacked_func(torch.ones(7, 3, 2, 8), lengths, 4, causal=True).shape
        torch.Size([7, 2, 8])
    """
    q, k, v = _unpack("flash_attn_varlen_qkvpacked_func", "qkv", qkv, 3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )


def _unpack(name: str, operand: str, packed: Tensor, count: int) -> tuple[Tensor, ...]:
    if packed.dim() != 4 or packed.size(1) != count:
        raise ValueError(
            f"{name}: expected {operand} of shape [total, {count}, num_heads, head_dim], "
            f"got {tuple(packed.shape)}"
        )
    return packed.unbind(1)
