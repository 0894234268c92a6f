"""One node of an ATen graph while it becomes a scalar expression: its arguments and its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from torch_flash_mps.flex.values import DTYPES, Expressions, Value


@dataclass(frozen=True)
class Element:
    """A captured tensor with some of its dimensions indexed; None: not yet."""

    tensor: Tensor
    indices: tuple[Value | None, ...]


Lowered = Value | Element


class Call:
    """One node of the graph while it is lowered."""

    def __init__(self, name: str, make: Expressions, node: fx.Node, lowered: dict) -> None:
        self.name, self.make, self.node, self.lowered = name, make, node, lowered
        self.args: tuple[Any, ...] = node.args
        meta = node.meta.get("val")
        self.dtype = meta.dtype if isinstance(meta, Tensor) else None

    def operator(self) -> str:
        return str(self.node.target).removesuffix(".default")

    def refuse(self, why: str = "") -> NotImplementedError:
        return NotImplementedError(
            f"flex_attention: {self.name} uses the operator {self.operator()}{why}, which is not "
            "supported; expected arithmetic, comparisons, where, min, max, clamp, abs, exp, log, "
            "tanh, sigmoid, sqrt, integer and logical operators, casts, and captured tensors that "
            "are indexed"
        )

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        if position < len(self.args):
            return self.args[position]
        return self.node.kwargs.get(name, default)

    def value(self, argument: Any, dtype: torch.dtype | None = None) -> Value:
        """An argument as a scalar of `dtype`; None: of its own."""
        if isinstance(argument, fx.Node):
            value = scalar(self.name, self.make, argument, self.lowered)
            return value if dtype is None else self.make.cast(value, dtype)
        own = {bool: torch.bool, int: torch.int64, float: torch.float32}.get(type(argument))
        if own is None:
            raise self.refuse(f" with {argument!r}")
        return self.make.constant(argument, dtype or own)

    def result(self, op: str, *args: Value) -> Value:
        return self.make.make(op, *args, dtype=self.own_dtype())

    def own_dtype(self) -> torch.dtype:
        if self.dtype not in DTYPES:
            raise self.refuse(f" with a result of {self.dtype}")
        return self.dtype

    def arithmetic(self, op: str, *arguments: Any) -> Value:
        """`op` on arguments of the result's dtype."""
        dtype = self.own_dtype()
        return self.result(op, *(self.value(argument, dtype) for argument in arguments))

    def comparison(self, op: str, a: Any, b: Any) -> Value:
        kinds = [one.meta["val"] if isinstance(one, fx.Node) else one for one in (a, b)]
        dtype = torch.result_type(*kinds)
        return self.result(op, self.value(a, dtype), self.value(b, dtype))


def scalar(name: str, make: Expressions, node: fx.Node, lowered: dict) -> Value:
    """The value of a node, which for a captured tensor is a load."""
    value = lowered[node]
    if isinstance(value, Value):
        return value
    if None in value.indices:
        raise NotImplementedError(
            f"flex_attention: expected {name} to index a captured tensor of shape "
            f"{tuple(value.tensor.shape)} down to one element before anything else, got "
            f"{value.indices.count(None)} dimensions left"
        )
    return make.load(value.tensor, value.indices)
