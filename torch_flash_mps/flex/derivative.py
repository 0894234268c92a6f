"""Derivatives of scalar expressions, by going back through them from the result."""

from __future__ import annotations

import torch

from torch_flash_mps.flex.operators import OPERATORS
from torch_flash_mps.flex.values import Expressions, Value, in_order


def derivatives(make: Expressions, result: Value, inputs: list[Value]) -> list[Value]:
    """Of `result` by each of `inputs`, float values that it may depend on."""
    gradients: dict[Value, Value] = {result: make.constant(1.0, result.dtype)}
    depends = _dependent(result, inputs)
    for value in reversed(list(in_order([result]))):
        gradient = gradients.get(value)
        operator = OPERATORS.get(value.op)
        if gradient is None or value not in depends or operator is None or not operator.gradient:
            continue
        parts = operator.gradient(make, value, gradient)
        for argument, part in zip(value.args, parts, strict=True):
            if part is None or argument not in depends:
                continue
            known = gradients.get(argument)
            gradients[argument] = part if known is None else make.make(
                "add", known, part, dtype=argument.dtype)
    return [make.cast(gradients.get(value, make.constant(0.0, torch.float32)), torch.float32)
            for value in inputs]


def _dependent(result: Value, inputs: list[Value]) -> set[Value]:
    """The values through which `result` depends on one of `inputs`."""
    found = set(inputs)
    for value in in_order([result]):
        if value.is_float and any(argument in found for argument in value.args):
            found.add(value)
    return found
