"""Fake kernels: the shapes, strides and dtypes of the ops, for torch.compile and export."""

from __future__ import annotations

import torch


def _leading_shape(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[int]:
    """Every dimension of the output before seqlen_q and head_dim_v."""
    if query.dim() == key.dim() == value.dim() == 4:
        batch = next((t.size(0) for t in (query, key, value) if t.size(0) != 1), query.size(0))
        return [batch, query.size(1)]
    ranks = [tensor.dim() for tensor in (query, key, value)]
    shapes = [tensor.shape[:-2] for tensor in (query, key, value)]
    if max(ranks) < 4:
        return list(torch.broadcast_shapes(*shapes))
    batch = torch.broadcast_shapes(*(shape[:-1] for shape in shapes))
    heads = query.size(-3) if query.dim() > 2 else 1
    return [*batch, heads]


def _empty_out(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    leading, rows, width = _leading_shape(query, key, value), query.size(-2), value.size(-1)
    is_4d = query.dim() == key.dim() == value.dim() == 4
    if is_4d and query.stride(1) < query.stride(2):
        batch, heads = leading
        return query.new_empty((batch, rows, heads, width)).transpose(1, 2)
    return query.new_empty((*leading, rows, width))


@torch.library.register_fake("flash_mps::attention")
def _attention_fake(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None,
    enable_gqa=False, window_left=-1, window_right=-1, softcap=0.0, alibi_slopes=None, sinks=None,
    is_bottom_right=False, rng_state=None, block_classes=None,
):
    return _empty_out(query, key, value)


@torch.library.register_fake("flash_mps::attention_with_lse")
def _attention_with_lse_fake(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None,
    enable_gqa=False, window_left=-1, window_right=-1, softcap=0.0, alibi_slopes=None, sinks=None,
    is_bottom_right=False, rng_state=None, block_classes=None,
):
    out = _empty_out(query, key, value)
    return out, query.new_empty(out.shape[:-1], dtype=torch.float32)


def _gradient(operand: torch.Tensor, is_4d: bool) -> torch.Tensor:
    """As its operand lies in memory: [B, S, H, D] order when it has it."""
    is_dense = operand.size(-1) <= 1 or operand.stride(-1) == 1
    if is_4d and is_dense and operand.stride(1) < operand.stride(2):
        batch, heads, seqlen, width = operand.shape
        return operand.new_empty((batch, seqlen, heads, width)).transpose(1, 2)
    return operand.new_empty(operand.shape)


@torch.library.register_fake("flash_mps::attention_backward")
def _attention_backward_fake(
    grad_out, grad_lse, query, key, value, out, lse, attn_mask, dropout_p, is_causal, *, scale,
    enable_gqa, window_left, window_right, softcap, alibi_slopes, sinks, is_bottom_right,
    rng_state, block_classes=None, output_mask,
):
    is_4d = query.dim() == key.dim() == value.dim() == 4
    operands = ((query, is_4d), (key, is_4d), (value, is_4d), (attn_mask, False), (sinks, False))
    return tuple(
        _gradient(*operand) if wanted else query.new_empty(0)
        for operand, wanted in zip(operands, output_mask, strict=True)
    )


@torch.library.register_fake("flash_mps::mask_block_classes")
def _mask_block_classes_fake(attn_mask):
    blocks = [(size + 31) // 32 for size in attn_mask.shape[-2:]]
    return attn_mask.new_empty((*attn_mask.shape[:-2], *blocks), dtype=torch.uint8)


@torch.library.register_fake("flash_mps::attention_with_kvcache")
def _attention_with_kvcache_fake(
    query, key, value, attn_mask=None, is_causal=False, *, scale=None, k_scale=None, v_scale=None,
    seqlens_k=None, seqlen_new=0, leftpad_k=None, cache_batch_idx=None, block_table=None,
    num_splits=0, window_left=-1, window_right=-1, softcap=0.0, alibi_slopes=None, sinks=None,
):
    # The batch is query's alone, whatever the cache holds.
    out = _empty_out(query, query, query.new_empty((*query.shape[:-1], value.size(-1))))
    return out, query.new_empty(out.shape[:-1], dtype=torch.float32)


@torch.library.register_fake("flash_mps::kvcache_append_")
def _kvcache_append_fake(
    key_cache, value_cache, key, value, *, k_scale=None, v_scale=None, seqlens=None, position=0,
    leftpad=None, cache_batch_idx=None, block_table=None, rotary_cos=None, rotary_sin=None,
    rotary_interleaved=False,
):
    return None


@torch.library.register_fake("flash_mps::rotary_embedding")
def _rotary_embedding_fake(
    x, cos, sin, *, seqlens=None, position=0, leftpad=None, interleaved=False, is_advancing=True,
):
    return _gradient(x, True)


@torch.library.register_fake("flash_mps::attention_varlen")
def _attention_varlen_fake(
    query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    is_causal=False, *, scale=None, window_left=-1, window_right=-1, softcap=0.0,
    alibi_slopes=None, sinks=None, is_bottom_right=False, rng_state=None,
):
    return query.new_empty((*query.shape[:-1], value.size(-1)))


@torch.library.register_fake("flash_mps::attention_varlen_with_lse")
def _attention_varlen_with_lse_fake(
    query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    is_causal=False, *, scale=None, window_left=-1, window_right=-1, softcap=0.0,
    alibi_slopes=None, sinks=None, is_bottom_right=False, rng_state=None,
):
    total_q, heads, _ = query.shape
    out = query.new_empty((total_q, heads, value.size(-1)))
    return out, query.new_empty((heads, total_q), dtype=torch.float32)


@torch.library.register_fake("flash_mps::attention_varlen_backward")
def _attention_varlen_backward_fake(
    grad_out, grad_lse, query, key, value, out, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
    max_seqlen_k, dropout_p, is_causal, *, scale, window_left, window_right, softcap,
    alibi_slopes, sinks, is_bottom_right, rng_state, output_mask,
):
    def of_rows(operand: torch.Tensor) -> torch.Tensor:
        return _gradient(operand.transpose(0, 1)[None], True)[0].transpose(0, 1)

    gradients = [of_rows(operand) if wanted else query.new_empty(0)
                 for operand, wanted in zip((query, key, value), output_mask, strict=False)]
    return *gradients, _gradient(sinks, False) if output_mask[3] else query.new_empty(0)


@torch.library.register_fake("flash_mps::flex_attention")
def _flex_attention_fake(
    query, key, value, captured, code, block_classes=None, *, scale=None, enable_gqa=False,
    for_backward=False,
):
    out = _empty_out(query, key, value)
    return out, query.new_empty(out.shape[:-1], dtype=torch.float32)


@torch.library.register_fake("flash_mps::flex_attention_backward")
def _flex_attention_backward_fake(
    grad_out, grad_lse, out, lse, query, key, value, captured, code, block_classes=None, *,
    scale=None, enable_gqa=False, output_mask,
):
    return tuple(
        _gradient(operand, True) if wanted else query.new_empty(0)
        for operand, wanted in zip((query, key, value), output_mask, strict=True)
    )
