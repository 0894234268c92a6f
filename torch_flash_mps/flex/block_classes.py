"""PyTorch's BlockMask -> the table that the kernels read: which blocks of pairs to skip."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

#: Queries and keys of one entry of the table, and its values: FLASH_MPS_CLASS_BLOCK and BlockClass
#: of metal/attn_params.h.
CLASS_BLOCK = 32
HIDDEN, MIXED, OPEN = 0, 1, 2

#: BLOCK_SIZE of a BlockMask that has one block.
_ONE_BLOCK = 1 << 30

_tables: weakref.WeakKeyDictionary[BlockMask, tuple[list, Tensor]] = weakref.WeakKeyDictionary()


def is_one_block(block_mask: BlockMask) -> bool:
    """Whether it divides nothing into blocks, as without a block mask."""
    return tuple(block_mask.BLOCK_SIZE) == (_ONE_BLOCK, _ONE_BLOCK)


def block_classes(block_mask: BlockMask | None, seqlen_q: int, seqlen_k: int) -> Tensor | None:
    """uint8 ``[1 or B, 1 or Hq, blocks of queries, blocks of keys]``; None: every block is mixed.

    Raises:
        NotImplementedError: a BLOCK_SIZE that is no multiple of 32.
    """
    if block_mask is None or is_one_block(block_mask):
        return None
    parts = (block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks,
             block_mask.full_kv_indices)
    state = [(None, 0) if part is None else (id(part), _version(part)) for part in parts]
    state.append((seqlen_q, seqlen_k))
    known = _tables.get(block_mask)
    if known is None or known[0] != state:
        known = _tables[block_mask] = (state, _make(block_mask, seqlen_q, seqlen_k))
    return known[1]


def _version(tensor: Tensor) -> object:
    """Equal as long as nothing was written; tensors of inference mode do not tell."""
    return object() if tensor.is_inference() else tensor._version


def _make(block_mask: BlockMask, seqlen_q: int, seqlen_k: int) -> Tensor:
    block_q, block_k = block_mask.BLOCK_SIZE
    if block_q % CLASS_BLOCK or block_k % CLASS_BLOCK:
        raise NotImplementedError(
            "flex_attention: expected a block_mask whose BLOCK_SIZE is made of multiples of "
            f"{CLASS_BLOCK}, got {(block_q, block_k)}"
        )
    columns = -(-seqlen_k // block_k)
    table = MIXED * _listed(block_mask.kv_num_blocks, block_mask.kv_indices, columns)
    full, indices = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    if full is not None and indices is not None:
        table = torch.where(_listed(full, indices, columns) != 0, OPEN, table).to(torch.uint8)
    for dim, block, seqlen in ((-2, block_q, seqlen_q), (-1, block_k, seqlen_k)):
        table = table.repeat_interleave(block // CLASS_BLOCK, dim=dim)
        table = table.narrow(dim, 0, -(-seqlen // CLASS_BLOCK))
    return table.contiguous()


def _listed(num_blocks: Tensor, indices: Tensor, columns: int) -> Tensor:
    """1 for each block of a row of blocks that is among the first so many of its list."""
    place = torch.arange(indices.size(-1), device=indices.device)
    is_listed = place < num_blocks.unsqueeze(-1)
    target = torch.where(is_listed, indices, columns).to(torch.int64)   # the others go beyond
    table = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.uint8, device=indices.device)
    return table.scatter(-1, target, 1)[..., :columns]


def expand_classes(classes: Tensor, rows: slice, seqlen_k: int) -> Tensor:
    """The class of each pair: ``[..., rows, seqlen_k]``."""
    queries = torch.arange(rows.start, rows.stop, device=classes.device) // CLASS_BLOCK
    keys = torch.arange(seqlen_k, device=classes.device) // CLASS_BLOCK
    return classes.index_select(-2, queries).index_select(-1, keys)
