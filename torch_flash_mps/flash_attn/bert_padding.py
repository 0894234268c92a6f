"""Padded batches to packed sequences and back, as `flash_attn.bert_padding` does it.

All of it is differentiable. `unpad_input` has to know how many tokens there are, so it waits for
the device; the others do not.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """``input[indices]``: rows ``[num_indices, ...]`` of ``[rows, ...]``.

    Example:
        >>> import torch
        >>> from torch_flash_mps.flash_attn.bert_padding import index_first_axis
        >>> index_first_axis(torch.arange(6).reshape(3, 2), torch.tensor([2, 0]))
        tensor([[4, 5],
                [0, 1]])
    """
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """``[first_axis_dim, ...]`` with `values` at the rows `indices` and 0 elsewhere."""
    empty = values.new_zeros((first_axis_dim, *values.shape[1:]))
    return empty.index_copy(0, indices.long(), values)   # int32 comes from cu_seqlens


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Takes the padding out of a batch.

    Args:
        hidden_states: ``[batch, seqlen, ...]``.
        attention_mask: ``[batch, seqlen]``, bool or int, 1 = a token.
        unused_mask: the same shape, 1 = a place that is kept but does not count as used.

    Returns:
        ``[total, ...]``, the tokens of all sequences; where they were among the
        ``batch * seqlen`` places, ``[total]``; cu_seqlens, int32 ``[batch + 1]``; the largest
        number of tokens; the numbers of used tokens, int32 ``[batch]``.

    Example:
        >>> import torch
        >>> from torch_flash_mps.flash_attn.bert_padding import pad_input, unpad_input
        >>> x, mask = torch.ones(2, 3, 4), torch.tensor([[1, 1, 1], [1, 0, 0]])
        >>> tokens, indices, cu_seqlens, max_seqlen, _ = unpad_input(x, mask)
        >>> tokens.shape, cu_seqlens.tolist(), max_seqlen
        (torch.Size([4, 4]), [0, 3, 4], 3)
        >>> pad_input(tokens, indices, batch=2, seqlen=3).sum(-1)
        tensor([[4., 4., 4.],
                [4., 0., 0.]])
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    seqlens = kept.sum(dim=-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = F.pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens,
        int(seqlens.max()), attention_mask.sum(dim=-1, dtype=torch.int32),
    )


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The way back: ``[total, ...]`` to ``[batch, seqlen, ...]``, 0 where no token is."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(
        0, (batch, seqlen)
    )
