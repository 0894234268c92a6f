"""A score_mod or mask_mod -> a scalar expression, through the ATen graph that torch.fx records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from torch_flash_mps.flex.aten import lower
from torch_flash_mps.flex.calls import Element, Lowered, scalar
from torch_flash_mps.flex.values import DTYPES, INDICES, SCORE, Expressions, Value


def trace(
    name: str, function: Callable[..., Tensor], has_score: bool, device: torch.device,
    make: Expressions,
) -> Value:
    """The expression of `function([score,] b, h, q_idx, kv_idx)`.

    Raises TypeError, NotImplementedError with the operator's name, or what the function raises.
    """
    graph_module = _record(name, function, has_score, device)
    graph_module.graph.eliminate_dead_code()
    names = (SCORE, *INDICES) if has_score else INDICES
    arguments = iter(make.argument(one) for one in names)
    lowered: dict[fx.Node, Lowered] = {}
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            lowered[node] = next(arguments)
        elif node.op == "get_attr":
            tensor = getattr(graph_module, node.target)
            lowered[node] = Element(tensor, (None,) * tensor.dim())
        elif node.op == "call_function":
            lowered[node] = lower(name, make, node, lowered)
        else:
            return _result(name, node.args[0], lowered, has_score, make)
    raise AssertionError("a graph ends with its output")


def _result(
    name: str, result: fx.Node | None, lowered: dict, has_score: bool, make: Expressions
) -> Value:
    if not isinstance(result, fx.Node):
        raise TypeError(f"flex_attention: expected {name} to return a tensor, got "
                        f"{type(result).__name__}")
    value = scalar(name, make, result, lowered)
    if not has_score and value.dtype != torch.bool:
        raise TypeError(f"flex_attention: expected {name} to return a bool tensor, got "
                        f"{value.dtype}")
    return make.cast(value, torch.float32) if has_score else value


_READS = {Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__bool__,
          Tensor.__int__, Tensor.__index__, Tensor.__float__, Tensor.__complex__}


class _Tracing(TorchFunctionMode):
    """Makes `tensor[b, h]` one ATen operator; else indices of rank 0 would ask for their values.

    The value of a captured tensor would be a number of the text, which must not depend on it.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.__getitem__:
            return _index(*args)
        if function in _READS:
            raise DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)
        return function(*args, **(kwargs or {}))


def _index(tensor: Tensor, index: Any) -> Tensor:
    items = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(item, Tensor) for item in items):
        return tensor[index]
    dim, left = 0, len(items)
    for item in items:
        left -= 1
        if isinstance(item, Tensor) and item.dim() == 0 and item.dtype != torch.bool:
            tensor = torch.ops.aten.index.Tensor(tensor, [None] * dim + [item])
        elif isinstance(item, int) and not isinstance(item, bool):
            tensor = tensor.select(dim, item)
        elif item is Ellipsis:
            dim = tensor.dim() - left
        elif item == slice(None):
            dim += 1
        else:
            raise NotImplementedError(
                "flex_attention: expected captured tensors to be indexed by b, h, q_idx, kv_idx, "
                f"integers and arithmetic on them, got {item!r}"
            )
    return tensor


def _record(
    name: str, function: Callable[..., Tensor], has_score: bool, device: torch.device
) -> fx.GraphModule:
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), _Tracing():
        arguments = [torch.empty((), dtype=torch.int64, device=device) for _ in INDICES]
        if has_score:
            arguments.insert(0, torch.empty((), dtype=torch.float32, device=device))
        try:
            return make_fx(lambda *pair: function(*pair))(*arguments)
        except DataDependentOutputException as error:
            raise NotImplementedError(
                f"flex_attention: {name} uses the operator {error.func}, the value of a tensor in "
                "Python (an `if`, `int()` or `.item()`); expected torch.where or arithmetic"
            ) from error


def check_captured(tensors: list[Tensor], device: torch.device, most: int) -> None:
    """Raises unless kernels can read the tensors that a call captures."""
    if len(tensors) > most:
        raise NotImplementedError(
            f"flex_attention: expected score_mod and mask_mod to capture at most {most} tensors, "
            f"got {len(tensors)}"
        )
    for tensor in tensors:
        text = f"a captured tensor of shape {tuple(tensor.shape)}"
        if tensor.dtype not in DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise NotImplementedError(
                f"flex_attention: expected captured tensors of dtype {names}, got {tensor.dtype} "
                f"({text})"
            )
        if tensor.numel() == 0:
            raise ValueError(f"flex_attention: expected captured tensors with elements, got {text}")
        if tensor.device != device and not (tensor.dim() == 0 and tensor.device.type == "cpu"):
            raise ValueError(
                f"flex_attention: expected captured tensors on the device of query, {device}, got "
                f"{text} on {tensor.device}"
            )
