"""KV caches: attention over one, which also appends to it, and 8-bit integers for one.

Layout is that of the flash_attn package, ``[batch, seqlen, num_heads, head_dim]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_flash_mps._extension import extension
from torch_flash_mps._flash_attn_args import check_layout, score_options

__all__ = ["flash_attn_with_kvcache", "quantize_kv"]

_NAME = "flash_attn_with_kvcache"


def quantize_kv(x: Tensor) -> tuple[Tensor, Tensor]:
    """Keys or values as 8-bit integers with one scale for each token and head.

    What `flash_attn_with_kvcache` does to new tokens of an int8 cache, and what it takes as such a
    cache: ``x ≈ integers * scale[..., None]`` with ``scale = max |x| / 127`` of the row.

    Args:
        x: ``[..., head_dim]``, floating-point, of any layout.

    Returns:
        The integers, int8 of x's shape, rounded to nearest even, and the scale, float32
        ``[...]``. Each element of x is met within ``scale / 2``, that is 1/254 of the largest of
        its row (and within the rounding of float32, 1e-5 of the scale). A row of zeros, or of
        numbers below 1e-36, has scale 0. A row that holds a NaN or Inf has that as its scale, so
        that it is NaN as a whole when multiplied out.

    Example:
        >>> import torch, torch_flash_mps
        >>> integers, scale = torch_flash_mps.quantize_kv(torch.tensor([[-0.5, 0.25, 1.27]]))
        >>> integers
        tensor([[-50,  25, 127]], dtype=torch.int8)
        >>> scale
        tensor([0.0100])
    """
    wide = x.float()
    scale = wide.abs().amax(-1) / 127.0
    scale = scale.masked_fill(scale < torch.finfo(torch.float32).tiny, 0.0)
    is_number = torch.isfinite(scale) & (scale > 0.0)
    steps = torch.round(wide / scale.masked_fill(~is_number, 1.0).unsqueeze(-1))
    return steps.masked_fill(~is_number.unsqueeze(-1), 0.0).to(torch.int8), scale


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a KV cache, to which new keys and values may be appended first.

    Nothing waits for the device, and no gradient is computed: an input that requires one is an
    error outside of ``torch.no_grad()``.

    Args:
        q: ``[batch, seqlen_q, num_heads_q, head_dim]``.
        k_cache, v_cache: ``[batch_cache, seqlen_max, num_heads_kv, head_dim or head_dim_v]``, or
            with a `block_table` ``[num_pages, page_size, num_heads_kv, ...]``, page_size a multiple
            of 16. Of q's dtype, or int8 with scales. Strided views are used where they lie.
        k, v: ``[batch, seqlen_new, num_heads_kv, ...]``, written to the slots cache_seqlens,
            cache_seqlens + 1, ... of each sequence; no other slot changes. Where the length is an
            int, more than the capacity is an error and nothing is written; where it is a tensor,
            what goes beyond the capacity, or to a page that does not exist, is dropped.
        rotary_cos, rotary_sin: ``[seqlen_ro, rotary_dim / 2]``, float32 or q's dtype, at least as
            many rows as slots. k, and q with it, are turned by the position of their slot, counted
            from `cache_leftpad`: q by cache_seqlens + i if `causal`, all by cache_seqlens if not.
        cache_seqlens: slots that are filled before this call: int, or int32 ``[batch]`` on q's
            device (int64 is converted). None: the whole cache, and no k and v.
        cache_batch_idx: int32 ``[batch]``, the cache entry of each sequence; distinct where k and v
            are given.
        cache_leftpad: int32 ``[batch]``, the first slot that counts.
        block_table: int32 ``[batch, max_pages_per_seq]``, the pages of each sequence.
        softmax_scale: factor of the scores; None means ``1 / sqrt(head_dim)``.
        causal: bottom-right over the filled slots of each sequence, new ones included.
        window_size, softcap, alibi_slopes: see `torch_flash_mps.flash_attn`; positions are counted
            from the last filled slot of each sequence.
        rotary_interleaved: pairs are neighbours (0, 1), ...; otherwise (0, rotary_dim / 2), ...
        num_splits: parts that the keys are split into; 0 lets the library choose.
        return_softmax_lse: also return the log-sum-exp.
        k_scale, v_scale: float32 ``[batch_cache, seqlen_max, num_heads_kv]`` (paged alike) of an
            int8 cache, as `torch_flash_mps.quantize_kv` makes them; written where k and v are.

    Returns:
        ``[batch, seqlen_q, num_heads_q, head_dim_v]`` in q's dtype; with `return_softmax_lse` also
        the natural log-sum-exp, float32 ``[batch, num_heads_q, seqlen_q]``. A query that sees no
        key gives 0 and -inf.

    Raises:
        ValueError, RuntimeError: inputs that do not fit. Where shapes, dtypes or lengths known here
            are at fault, nothing was written.

    Example:
        >>> import torch
        >>> from torch_flash_mps.flash_attn import flash_attn_with_kvcache
        >>> k_cache, v_cache = torch.zeros(1, 64, 2, 8), torch.zeros(1, 64, 2, 8)
        >>> q, new = torch.ones(1, 1, 4, 8), torch.ones(1, 1, 2, 8)
        >>> out = flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=3)
        >>> k_cache[0, :, 0, 0].nonzero()
        tensor([[3]])
    """
    extension()
    check_layout(_NAME, q=q, k_cache=k_cache, v_cache=v_cache)
    _check_new_tokens(q, k_cache, k, v, rotary_cos, rotary_sin, cache_seqlens)
    ops = torch.ops.flash_mps
    seqlen_new = 0 if k is None else k.size(1)
    start = _start(k_cache, block_table, cache_seqlens, seqlen_new) | {"leftpad": cache_leftpad}
    where = {"cache_batch_idx": cache_batch_idx, "block_table": block_table}
    query, keys, values = (x.transpose(1, 2) for x in (q, k_cache, v_cache))
    scales = [None if scale is None else scale.transpose(1, 2) for scale in (k_scale, v_scale)]
    if k is not None and v is not None:
        if rotary_cos is not None:
            query = ops.rotary_embedding(query, rotary_cos, rotary_sin, **start,
                                         interleaved=rotary_interleaved, is_advancing=causal)
        ops.kvcache_append_(
            keys, values, k.transpose(1, 2), v.transpose(1, 2), k_scale=scales[0],
            v_scale=scales[1], **start, **where, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
            rotary_interleaved=rotary_interleaved,
        )
    seqlens = start["seqlens"]
    if seqlens is None and cache_seqlens is not None:   # an int
        filled = start["position"] + seqlen_new
        if block_table is None:
            keys, values = keys[:, :, :filled], values[:, :, :filled]
            scales = [None if scale is None else scale[:, :, :filled] for scale in scales]
        else:
            seqlens = torch.full((q.size(0),), filled - seqlen_new, dtype=torch.int32,
                                 device=q.device)
    out, lse = ops.attention_with_kvcache(
        query, keys, values, None, causal, scale=softmax_scale, k_scale=scales[0],
        v_scale=scales[1], seqlens_k=seqlens, seqlen_new=seqlen_new, leftpad_k=cache_leftpad,
        **where, num_splits=num_splits, **score_options(window_size, softcap, alibi_slopes),
    )
    return (out.transpose(1, 2), lse) if return_softmax_lse else out.transpose(1, 2)


def _start(
    k_cache: Tensor, block_table: Tensor | None, cache_seqlens: int | Tensor | None,
    seqlen_new: int,
) -> dict[str, Any]:
    """Where the new tokens begin, in the words of the ops."""
    if isinstance(cache_seqlens, Tensor):
        is_long = cache_seqlens.dtype == torch.int64
        return {"seqlens": cache_seqlens.to(torch.int32) if is_long else cache_seqlens,
                "position": 0}
    if cache_seqlens is None:
        return {"seqlens": None, "position": 0}
    capacity = k_cache.size(1) * (1 if block_table is None else block_table.size(1))
    if not 0 <= cache_seqlens <= capacity - seqlen_new:
        raise ValueError(
            f"{_NAME}: expected cache_seqlens between 0 and {capacity - seqlen_new} for "
            f"{seqlen_new} new tokens in {capacity} slots, got {cache_seqlens}"
        )
    return {"seqlens": None, "position": cache_seqlens}


def _check_new_tokens(
    q: Tensor, k_cache: Tensor, k: Tensor | None, v: Tensor | None, rotary_cos: Tensor | None,
    rotary_sin: Tensor | None, cache_seqlens: int | Tensor | None,
) -> None:
    """What would otherwise be found when the cache is written already."""
    if (k is None) != (v is None) or (rotary_cos is None) != (rotary_sin is None):
        raise ValueError(f"{_NAME}: expected both of k, v and both of rotary_cos, rotary_sin, or "
                         "none, got one")
    if k is None or v is None:
        if rotary_cos is not None:
            raise ValueError(f"{_NAME}: expected k and v with rotary_cos and rotary_sin, got none")
        return
    if cache_seqlens is None:
        raise ValueError(f"{_NAME}: expected cache_seqlens with k and v, got none")
    check_layout(_NAME, q=q, k=k, v=v)
    if (q.size(0), q.size(3), q.dtype) != (k.size(0), k_cache.size(3), k.dtype):
        raise ValueError(
            f"{_NAME}: expected q with the batch and dtype of k and the head_dim of k_cache, got q "
            f"{tuple(q.shape)} of {q.dtype}, k {tuple(k.shape)} of {k.dtype}, k_cache "
            f"{tuple(k_cache.shape)}"
        )
    if q.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{_NAME}: expected q without requires_grad, got one that requires it; "
                           "there is no gradient, call it under torch.no_grad()")
