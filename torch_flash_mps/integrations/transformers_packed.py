"""Packed sequences in transformers: from position ids that restart, or from `cu_seq_lens_*`.

Where position ids restart, transformers asks for a mask that is causal within each sequence. In its
place models get the boundaries of the sequences, int32 `[num_sequences + 1]`, which they hand to
the attention function as they hand on a mask; no `[seqlen, seqlen]` mask is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from torch_flash_mps.varlen import attention_varlen

_KWARGS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


@dataclass(frozen=True)
class Packing:
    """Boundaries of sequences that lie behind each other in the rows of a batch."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlens: tuple[int | Tensor, int | Tensor] | None = None   # None: not known

    def attend(self, query: Tensor, key: Any, value: Any, **options: Any) -> Tensor:
        """`[batch, heads, seqlen, head_dim]` each -> `[batch, seqlen_q, heads, head_dim_v]`."""
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        max_q, max_k = self.max_seqlens or (query.shape[2], key.shape[2])
        out = attention_varlen(q, k, v, self.cu_seqlens_q, self.cu_seqlens_k, max_q, max_k,
                               is_bottom_right=True, **options)
        assert isinstance(out, Tensor)   # no lse was asked for
        return out.unflatten(0, (query.shape[0], query.shape[2]))


def find_packing(attention_mask: Tensor | None, kwargs: dict[str, Any]) -> Packing | None:
    """What the caller says of it, or what `boundaries` made; a real mask says everything itself."""
    has_boundaries = attention_mask is not None and attention_mask.dim() == 1
    if attention_mask is not None and not has_boundaries:
        return None
    cu_seqlens_q, cu_seqlens_k, max_q, max_k = (kwargs.get(name) for name in _KWARGS)
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        most = None if max_q is None or max_k is None else (max_q, max_k)
        return Packing(cu_seqlens_q, cu_seqlens_k, most)
    return None if attention_mask is None else Packing(attention_mask, attention_mask)


def boundaries(mask_function: Callable | None, window: int | None) -> Tensor | None:
    """Where sequences begin and end, if the mask is causal (in a window) within each and no more.

    Args:
        mask_function: what transformers would make a mask of.
        window: None, or the window that its layer keeps to.
    """
    from transformers import masking_utils as masks

    if not isinstance(mask_function, FunctionType) or torch.compiler.is_compiling():
        return None
    causal = masks.causal_mask_function
    if window is not None:
        causal = masks.sliding_window_causal_mask_function(window)
    parts = _variables(mask_function).get("mask_functions", ())
    if len(parts) != 2 or not all(isinstance(part, FunctionType) for part in parts):
        return None
    positions = _variables(parts[0]).get("position_ids")
    sequences = _variables(parts[1]).get("packed_sequence_mask")
    if positions is None or sequences is None:
        return None
    expected = masks.and_masks(
        masks.remap_positions_for_packed_sequence(causal, positions),
        masks.packed_sequence_mask_function(sequences),
    )
    if meaning(mask_function) != meaning(expected):
        return None
    is_first = torch.ones_like(sequences, dtype=torch.bool)
    is_first[:, 1:] = sequences[:, 1:] != sequences[:, :-1]
    starts = is_first.flatten().nonzero().flatten()
    return torch.cat((starts, starts.new_tensor([sequences.numel()]))).int()


def meaning(what: Any) -> Any:
    """Equal for functions of the same code over the same numbers, tensors and functions."""
    if isinstance(what, FunctionType):
        return what.__code__, tuple(meaning(cell.cell_contents) for cell in what.__closure__ or ())
    if isinstance(what, tuple):
        return tuple(map(meaning, what))
    return what if isinstance(what, int) else id(what)


def _variables(function: FunctionType) -> dict[str, Any]:
    """What a function holds of the one around it."""
    cells = function.__closure__ or ()
    return {name: cell.cell_contents
            for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}
