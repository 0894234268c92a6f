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
):
    return _empty_out(query, key, value)


@torch.library.register_fake("flash_mps::attention_with_lse")
def _attention_with_lse_fake(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None,
    enable_gqa=False, window_left=-1, window_right=-1, softcap=0.0, alibi_slopes=None, sinks=None,
):
    out = _empty_out(query, key, value)
    return out, query.new_empty(out.shape[:-1], dtype=torch.float32)
