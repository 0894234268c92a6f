"""What a call may not be. Where PyTorch's flex_attention refuses it too: the same exception."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_flash_mps.flex.block_classes import is_one_block
from torch_flash_mps.flex.values import FLOATS, MAX_BATCH, MAX_SEQLEN

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def check_types(query: Any, key: Any, value: Any, score_mod: Any, block_mask: Any) -> None:
    for name, operand in (("query", query), ("key", key), ("value", value)):
        if not isinstance(operand, Tensor):
            raise TypeError(f"flex_attention: expected {name} to be a tensor, got "
                            f"{type(operand).__name__}")
    if query.device.type not in ("cpu", "mps"):
        raise ValueError(f"flex_attention: expected query on mps or cpu, got {query.device}")
    if score_mod is not None and not callable(score_mod):
        raise TypeError("flex_attention: expected score_mod to be a function or None, got "
                        f"{type(score_mod).__name__}")
    if block_mask is not None and not hasattr(block_mask, "kv_num_blocks"):
        raise TypeError("flex_attention: expected block_mask to be a BlockMask, of "
                        f"create_block_mask, or None, got {type(block_mask).__name__}")


def check_call(
    query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask | None, enable_gqa: bool
) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if torch._C._functorch.is_batchedtensor(tensor):
            raise NotImplementedError("flex_attention: torch.vmap is not supported; expected one "
                                      "call with the mapped dimension as a batch")
        if tensor.is_nested or tensor.dim() != 4:
            raise NotImplementedError(
                f"flex_attention: expected {name} of rank 4, [B, H, S, D], got "
                f"{'a nested tensor' if tensor.is_nested else tuple(tensor.shape)}")
    _check_kinds(query, key, value)
    _check_sizes(query, key, value, block_mask, enable_gqa)
    if block_mask is not None:
        _check_block_mask(block_mask, query, key)


def _check_kinds(query: Tensor, key: Tensor, value: Tensor) -> None:
    if query.dtype not in FLOATS:
        raise ValueError("flex_attention: expected query of dtype float32, float16 or bfloat16, "
                         f"got {query.dtype}")
    for name, tensor in (("key", key), ("value", value)):
        if (tensor.dtype, tensor.device) != (query.dtype, query.device):
            raise ValueError(
                f"flex_attention: expected {name} with the dtype and device of query, "
                f"{query.dtype} on {query.device}, got {tensor.dtype} on {tensor.device}")


def _check_sizes(
    query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask | None, enable_gqa: bool
) -> None:
    num_heads_q, num_heads_kv = query.size(1), key.size(1)
    if query.size(3) != key.size(3):
        raise ValueError(f"flex_attention: expected key with the head_dim of query, "
                         f"{query.size(3)}, got {key.size(3)}")
    if value.shape[:3] != key.shape[:3]:
        raise ValueError("flex_attention: expected value of key's batch, heads and seqlen, "
                         f"{tuple(key.shape[:3])}, got {tuple(value.shape[:3])}")
    if num_heads_q != num_heads_kv and not enable_gqa:
        raise ValueError("flex_attention: expected enable_gqa=True where query and key differ in "
                         f"head count, got {num_heads_q} and {num_heads_kv} heads without it")
    if num_heads_kv == 0 or num_heads_q % num_heads_kv:
        raise ValueError("flex_attention: expected a query head count that is a multiple of key's, "
                         f"got {num_heads_q} and {num_heads_kv}")
    if query.size(0) != key.size(0):
        of_mask = None if block_mask is None else block_mask.kv_num_blocks.size(0)
        if key.size(0) != 1 or of_mask != query.size(0):
            raise ValueError(
                "flex_attention: expected query and key of equal batch size, or a block_mask of "
                f"query's and a key of 1, got {query.size(0)}, {key.size(0)} and {of_mask}")
    if max(query.size(2), key.size(2)) >= MAX_SEQLEN or max(query.shape[:2]) >= MAX_BATCH:
        raise ValueError(
            f"flex_attention: expected seqlens below {MAX_SEQLEN}, batch and heads below "
            f"{MAX_BATCH}, got query {tuple(query.shape)}, key {tuple(key.shape)}")


def _check_block_mask(block_mask: BlockMask, query: Tensor, key: Tensor) -> None:
    num_blocks = block_mask.kv_num_blocks
    if num_blocks.device != query.device:
        raise RuntimeError("flex_attention: expected block_mask on the device of query, "
                           f"{query.device}, got {num_blocks.device}")
    if is_one_block(block_mask):
        return
    if any(size not in (1, wanted) for size, wanted in zip(num_blocks.shape, query.shape[:2],
                                                           strict=False)):
        raise ValueError(
            "flex_attention: expected a block_mask of batch and heads 1 or those of query, "
            f"{tuple(query.shape[:2])}, got {tuple(num_blocks.shape[:2])}")
    made_for, found = tuple(block_mask.shape[-2:]), (query.size(2), key.size(2))
    if made_for != found:
        raise ValueError(
            f"flex_attention: expected a block_mask that was created for q_len={found[0]} and "
            f"kv_len={found[1]}, got one for {made_for[0]} and {made_for[1]}; create it anew, or "
            "crop a larger one with block_mask._adjust(q_len, kv_len)")
