"""Scalar expressions on whole tensors: the same values as the Metal source, in torch operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_flash_mps.flex.operators import OPERATORS
from torch_flash_mps.flex.values import Value, in_order


def evaluate(
    outputs: Sequence[Value], arguments: dict[str, Tensor], captured: Sequence[Tensor]
) -> list[Tensor]:
    """Each of `outputs`, broadcast over `arguments`, which are by name. Differentiable."""
    device = arguments["q_idx"].device
    found: dict[Value, Tensor] = {}
    for value in in_order(outputs):
        if value.op == "argument":
            result = arguments[value.data]
        elif value.op == "constant":
            result = torch.full((), value.data, dtype=value.dtype, device=device)
        elif value.op == "load":
            result = _load(captured[value.data], [found[index] for index in value.args])
        else:
            result = OPERATORS[value.op].torch(*(found[one] for one in value.args))
        found[value] = result.to(value.dtype)
    return [found[output] for output in outputs]


def element_numbers(
    load: Value, arguments: dict[str, Tensor], captured: Sequence[Tensor]
) -> Tensor:
    """Which element of its tensor, counted row by row, a load reads for each pair."""
    tensor = captured[load.data]
    indices = evaluate(load.args, arguments, captured)
    number = torch.zeros((), dtype=torch.int64, device=arguments["q_idx"].device)
    for size, index in zip(tensor.shape, indices, strict=True):
        number = number * size + _within(index, size)
    return number


def _within(index: Tensor, size: int) -> Tensor:
    """Negative indices count from the end; what is beyond either end is the element there."""
    index = index.to(torch.int64)
    return torch.where(index < 0, index + size, index).clamp(0, size - 1)


def _load(tensor: Tensor, indices: list[Tensor]) -> Tensor:
    if not indices:
        return tensor
    return tensor[tuple(_within(i, size) for i, size in zip(indices, tensor.shape, strict=True))]
