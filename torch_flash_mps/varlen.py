"""Attention over packed sequences: many lengths in one tensor, one launch, no padding."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_flash_mps._extension import extension


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    is_bottom_right: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of sequences that lie behind each other: sequence i sees its own keys only.

    Shapes:
        q: ``[total_q, num_heads_q, head_dim]``; k: ``[total_k, num_heads_kv, head_dim]``; v:
        ``[total_k, num_heads_kv, head_dim_v]``; returns ``[total_q, num_heads_q, head_dim_v]``.
        Query head h reads KV head ``h // (num_heads_q / num_heads_kv)``.

    Dtypes: float32, float16 or bfloat16, the same for q, k and v; scores and sums are float32.

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 or int64, ``[num_sequences + 1]``, on q's device or the
            CPU. Sequence i holds the rows ``cu_seqlens_q[i]`` to ``cu_seqlens_q[i + 1] - 1`` of q
            and likewise of k and v; each may be empty. On a device they are never read by the
            host: numbers beyond the tensors are clamped by the kernel, so wrong ones give wrong
            results, but reach no other memory. On the CPU, wrong ones are an error.
        max_seqlen_q, max_seqlen_k: the largest lengths. No result depends on them, even if they
            are too small: the kernel finds the lengths itself. They estimate the work of a call,
            which is split where it is very long.
        is_bottom_right: in each sequence the last query stands at its last key, as in flash_attn;
            otherwise the first at the first.
        dropout_p, is_causal, scale, window_left, window_right, softcap, sinks: as in
            :func:`attention`, within each sequence.
        alibi_slopes: ``[num_heads_q]`` or ``[num_sequences, num_heads_q]``.
        return_lse: also return the natural log-sum-exp of the scores, float32
            ``[num_heads_q, total_q]``.

    Gradients: for q, k, v and sinks, also through the log-sum-exp. Rows before the first and after
    the last sequence give 0, an lse of -inf and gradients of 0, whatever they hold; as do queries
    of a sequence without keys (their lse is the sink where there is one).

    Raises:
        RuntimeError: the inputs do not fit; says op, operand, what was expected and what was found.
        NotImplementedError: a gradient that is not supported.

    Example:
        >>> import torch, torch_flash_mps
        >>> q = k = v = torch.ones(7, 2, 8)
        >>> lengths = torch.tensor([0, 3, 7])   # of 3 and 4 tokens
        >>> torch_flash_mps.attention_varlen(q, k, v, lengths, lengths, 4, 4).shape
        torch.Size([7, 2, 8])
    """
    extension()
    ops = torch.ops.flash_mps
    op = ops.attention_varlen_with_lse if return_lse else ops.attention_varlen
    return op(
        q, k, v, cu_seqlens_q, cu_seqlens_k, _as_int(max_seqlen_q, q), _as_int(max_seqlen_k, k),
        dropout_p, is_causal, scale=scale, window_left=window_left, window_right=window_right,
        softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, is_bottom_right=is_bottom_right,
    )


def _as_int(max_seqlen: int | Tensor, rows: Tensor) -> int:
    """A number on a device is not waited for: no sequence has more than all rows."""
    if isinstance(max_seqlen, Tensor) and not max_seqlen.is_cpu:
        return rows.size(0)
    return int(max_seqlen)
