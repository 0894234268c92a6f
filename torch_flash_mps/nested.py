"""`F.scaled_dot_product_attention` of jagged nested tensors on mps, while `enable_sdpa()` holds.

A jagged tensor (`torch.nested`, layout `torch.jagged`) is a Python subclass: its attention never
reaches the dispatcher, where the other inputs are met. Its `__torch_function__` calls one function
of PyTorch, by its name in a module, and this name is what `enable` points elsewhere.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

Nested = Any   # a nested tensor: a Tensor with methods that Tensor does not declare

_MODULE, _NAME = "torch.nested._internal.ops", "jagged_scaled_dot_product_attention"
_previous: Callable[..., Nested] | None = None   # of PyTorch, while ours is in its place


def enable() -> None:
    """Puts ours in front, where the installed torch has the function."""
    global _previous
    module = _module()
    if _previous is None and hasattr(module, _NAME):
        _previous = getattr(module, _NAME)
        setattr(module, _NAME, _attention)


def disable() -> None:
    """Takes it away again."""
    global _previous
    if _previous is not None:
        setattr(_module(), _NAME, _previous)
        _previous = None


def _module() -> Any:
    return importlib.import_module(_MODULE)


def _attention(
    query: Nested, key: Nested, value: Nested, attn_mask: Any = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Nested:
    """`F.scaled_dot_product_attention` of `[batch, heads, jagged seqlen, head_dim]`."""
    operands = (query, key, value)
    previous = _previous
    if previous is not None and not (attn_mask is None and all(map(_is_taken, operands))):
        return previous(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p,
                        is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    from torch.nested._internal import nested_tensor

    _check(query, key, value, enable_gqa)
    rows = [tensor.transpose(1, 2).values() for tensor in operands]
    most = [rows[0].size(0), rows[1].size(0)]
    out = torch.ops.flash_mps.attention_varlen(
        *rows, query.offsets(), key.offsets(), *most, dropout_p, is_causal, scale=scale
    )
    # As torch.nested.nested_tensor_from_jagged, which torch.compile does not trace.
    return nested_tensor.nested_view_from_values_offsets_lengths(
        out, query.offsets(), None, min_seqlen=query._maybe_min_seqlen,
        max_seqlen=query._maybe_max_seqlen,
    ).transpose(1, 2)


def _is_taken(tensor: Nested) -> bool:
    """Whether a tensor is jagged in its sequence dimension, on mps, and without holes."""
    return (
        tensor.layout == torch.jagged and tensor.device.type == "mps" and tensor.dim() == 4
        and tensor._ragged_idx == 2 and tensor.lengths() is None
    )


def _check(query: Nested, key: Nested, value: Nested, enable_gqa: bool) -> None:
    def expect(is_met: bool, expected: str) -> None:
        if not is_met:
            raise RuntimeError(
                f"scaled_dot_product_attention: expected {expected}, got query {query.shape}, key "
                f"{key.shape}, value {value.shape}"
            )

    expect(query.size(0) == key.size(0), "query and key of equal batch size")
    expect(_is_of_same_lengths(key, value), "value with the sequence lengths of key")
    expect(enable_gqa or query.size(1) == key.size(1),
           "enable_gqa=True where query and key differ in head count")


def _is_of_same_lengths(one: Nested, other: Nested) -> bool:
    """A size of a jagged dimension stands for its offsets, so only tensors that were made apart,
    each with offsets of its own, wait for the device."""
    return one.size(2) == other.size(2) or torch.equal(
        one.offsets().long(), other.offsets().long())
