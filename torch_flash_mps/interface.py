"""The public functions. No kernel is named here; what an argument means is said here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_flash_mps._extension import extension


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q kᵀ · scale + mask) v without the score matrix (FlashAttention-2, Dao 2023).

    Shapes (layout ``[B, H, S, D]``, as ``F.scaled_dot_product_attention``):
        q: ``[batch, num_heads_q, seqlen_q, head_dim]``; k: ``[batch, num_heads_kv, seqlen_k,
        head_dim]``; v: ``[batch, num_heads_kv, seqlen_k, head_dim_v]``; returns
        ``[batch, num_heads_q, seqlen_q, head_dim_v]``. Ranks 2, 3 and above 4 as in PyTorch.
        The output lies in memory like q: ``[B, S, H, D]`` order when q has it.

    Dtypes: float32, float16 or bfloat16, the same for q, k and v; scores and sums are float32.

    Args:
        attn_mask: bool (True = may attend) or float (added to the score), broadcastable to
            ``[batch, num_heads_q, seqlen_q, seqlen_k]``; never expanded or copied. A float mask has
            q's dtype or float32. Blocks of 32 x 32 pairs that it hides are skipped, where finding
            them costs little beside the call. Together with ``is_causal``: the intersection.
        dropout_p: probability that a pair (query, key) loses its weight; the others are multiplied
            by 1 / (1 - dropout_p). Random numbers are made inside of the kernels (Philox 4x32-10),
            from a seed of torch's default generator: ``torch.manual_seed`` repeats them, and
            checkpointing replays them. The log-sum-exp knows nothing of it.
        is_causal: query i sees keys j <= i, also where seqlen_q differs from seqlen_k (top-left).
        scale: factor of the scores; ``None`` means ``1 / sqrt(head_dim)``.
        enable_gqa: required where num_heads_q is a multiple of num_heads_kv; query head h reads
            KV head ``h // (num_heads_q / num_heads_kv)``.
        window_left, window_right: query i sees the keys i - window_left <= j <= i + window_right;
            -1 is unlimited. Together with a mask and ``is_causal``: the intersection. Keys that no
            query of a block sees are not read.
        softcap: scores become ``softcap * tanh(scores / softcap)``, before ALiBi and mask; 0: off.
        alibi_slopes: ``[num_heads_q]`` or ``[batch, num_heads_q]``, float32 or q's dtype; adds
            ``-slope * abs(i - j)`` (Press et al. 2022).
        sinks: ``[num_heads_q]``, float32 or q's dtype; exp(sink) joins the denominator of each row
            of the head, and its log-sum-exp, like a key without a value (Xiao et al. 2023).
        return_lse: also return the natural log-sum-exp of the scores, float32
            ``[batch, num_heads_q, seqlen_q]``.

    Gradients: for q, k, v, a float attn_mask and sinks, also through the log-sum-exp; only those
    that are asked for are computed, nothing of the size of the score matrix is kept. Not for
    alibi_slopes. Double backward and forward-mode differentiation are errors.

    A query that sees no key gives 0 and an lse of -inf, or of its sink. A key that no query sees
    never contributes, whatever it holds; a NaN in a value that some query sees may reach other
    queries of its block. The gradients of both are 0.

    Raises:
        RuntimeError: the inputs do not fit; says op, operand, what was expected and what was found.
        NotImplementedError: a gradient that is not supported.

    Example:
        >>> import torch, torch_flash_mps
        >>> q = k = v = torch.ones(1, 2, 3, 8)
        >>> torch_flash_mps.attention(q, k, v, is_causal=True).shape
        torch.Size([1, 2, 3, 8])
    """
    extension()
    op = torch.ops.flash_mps.attention_with_lse if return_lse else torch.ops.flash_mps.attention
    return op(
        q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa,
        window_left=window_left, window_right=window_right, softcap=softcap,
        alibi_slopes=alibi_slopes, sinks=sinks,
    )


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> dict[str, Any]:
    """What :func:`attention` with the same arguments would run. Nothing is computed.

    Returns:
        ``kernel``: its name, None when no kernel would run; ``reason``: then why. For a kernel also
        ``op``: "flash_decode" with up to 16 queries whose gradient is not wanted, without dropout,
        else "flash_fwd"; ``family`` (row of the tiling table), ``block_q``, ``block_k``,
        ``num_simdgroups``, ``path`` ("staged": K and V go through threadgroup memory; "direct":
        they are read where they are), ``home`` (of the query tile: "registers" or "device"),
        ``classifies_mask`` (whether a pass over attn_mask first finds the blocks that can be
        skipped). For flash_fwd ``num_q_blocks``, ``num_head_blocks`` (threadgroups that share the
        columns of a block) and ``num_dispatches``. For flash_decode ``num_rows``, the query rows
        that read one KV head: seqlen_q times the heads of a group; ``row_tiles`` of ``block_q``
        rows in a threadgroup, ``num_row_blocks`` of so many tiles, and ``num_splits``, the parts of
        the keys that different threadgroups read; 1 means that there is no second pass.

    Example:
        >>> import torch, torch_flash_mps
        >>> q = torch.ones(1, 2, 3, 8)
        >>> torch_flash_mps.explain(q, q, q)["reason"]
        'inputs on cpu run as plain PyTorch ops'
    """
    return extension().explain(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, window_left, window_right,
        softcap, alibi_slopes, sinks, False, None, None, return_lse,
    )


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over all keys from attention over two disjoint sets of them; exact, differentiable.

    For chunked prefill and context parallelism: each state is what :func:`attention` returns with
    ``return_lse=True`` for the same queries and its own keys. Merging is associative, and an empty
    state (out 0, lse -inf) changes nothing; two of them give an empty state.

    Args:
        out_a, out_b: ``[batch, num_heads_q, seqlen_q, head_dim_v]``, or any leading dimensions.
        lse_a, lse_b: the same without the last dimension. Sinks may count in one state only.

    Returns:
        ``out`` in the dtype of out_a and out_b, ``lse`` in that of lse_a and lse_b. Sums are
        float32.

    Raises:
        ValueError: shapes that do not fit together.

    Example:
        >>> import torch, torch_flash_mps
        >>> q, k, v = torch.randn(3, 1, 2, 10, 8)
        >>> whole, _ = torch_flash_mps.attention(q, k, v, return_lse=True)
        >>> first = torch_flash_mps.attention(q, k[:, :, :4], v[:, :, :4], return_lse=True)
        >>> rest = torch_flash_mps.attention(q, k[:, :, 4:], v[:, :, 4:], return_lse=True)
        >>> out, lse = torch_flash_mps.merge_states(*first, *rest)
        >>> torch.allclose(out, whole, atol=1e-6)
        True
    """
    shapes = [tuple(x.shape) for x in (out_a, lse_a, out_b, lse_b)]
    if out_a.dim() < 1 or shapes != [shapes[0], shapes[0][:-1]] * 2:
        raise ValueError(
            "merge_states: expected out_a and out_b of one shape, lse_a and lse_b of that shape "
            f"without its last dimension, got {', '.join(map(str, shapes))}"
        )
    # The larger lse is taken out of the sums. No result depends on it, so it needs no gradient.
    shift = torch.maximum(lse_a, lse_b).detach().float()
    shift = shift.masked_fill(shift == -torch.inf, 0.0)
    weight_a, weight_b = (torch.exp(lse.float() - shift) for lse in (lse_a, lse_b))
    total = weight_a + weight_b
    is_empty = total == 0
    total = total.masked_fill(is_empty, 1.0)
    out = out_a * (weight_a / total).unsqueeze(-1) + out_b * (weight_b / total).unsqueeze(-1)
    lse = (shift + torch.log(total)).masked_fill(is_empty, -torch.inf)
    return out.to(torch.result_type(out_a, out_b)), lse.to(torch.result_type(lse_a, lse_b))
