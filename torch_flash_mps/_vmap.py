"""torch.vmap: the mapped dimension becomes one more batch dimension, so one call does all of it.

`torch.library.register_vmap` takes no op with tensors among its keyword-only arguments, so the
rules are registered here in the way in which it would do it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("flash_mps", "IMPL")


class _Mapping:
    """Operands without and with a mapped dimension, for one call.

    The op reads `[V, N, S, D]` as batch and heads. Operands of rank 3, whose N is a batch, get a
    head dimension of their own therefore, and those of rank 2 both: `[V, N, 1, S, D]`.
    """

    def __init__(self, size: int, operands: list[tuple[Tensor, int | None]]) -> None:
        self.size = size
        self.rank = max(tensor.dim() - (dim is not None) for tensor, dim in operands)

    def front(self, tensor: Tensor, dim: int | None) -> Tensor:
        """[V, ...]; a tensor without a mapped dimension is expanded."""
        if dim is None:
            return tensor.expand(self.size, *tensor.shape)
        return tensor.movedim(dim, 0)

    def fold(self, tensor: Tensor | None, dim: int | None, trailing: int = 2) -> Tensor | None:
        """[V, B, H, ...] with `trailing` dimensions after the heads."""
        if tensor is None:
            return None
        result = self.front(tensor, dim)
        while result.dim() - 1 < self.rank - 2 + trailing:
            result = result.unsqueeze(1)
        for _ in range(self.rank, 4):
            result = result.unsqueeze(self.rank - 1)
        return result

    def unfold(self, result: Tensor) -> Tensor:
        """A result of the op on folded tensors -> [V, ...] as without vmap."""
        for _ in range(self.rank, 4):
            result = result.squeeze(self.rank - 1)
        return result


def _forward_rule(op: Callable) -> Callable:
    def rule(info, in_dims, classes, query, key, value, attn_mask=None, *options, **named):
        dims = [*in_dims[1:], None][:4]
        mapping = _Mapping(info.batch_size, list(zip((query, key, value), dims[:3], strict=True)))
        operands = zip((query, key, value, attn_mask), dims, strict=True)
        results = op(*(mapping.fold(*operand) for operand in operands), *options,
                     block_classes=mapping.fold(classes, in_dims[0]), **named)
        if isinstance(results, Tensor):
            return mapping.unfold(results), 0
        return tuple(map(mapping.unfold, results)), (0,) * len(results)

    return rule


def _backward_rule(op: Callable) -> Callable:
    def rule(
        info, in_dims, classes, grad_out, grad_lse, query, key, value, out, lse, attn_mask,
        *options, output_mask, **named,
    ):
        classes_dim, *in_dims = in_dims
        if output_mask[4]:
            raise NotImplementedError(
                "flash_mps::attention_backward: torch.vmap over the gradient of sinks is not "
                "supported"
            )
        operands = list(zip((query, key, value, attn_mask), (*in_dims[2:5], in_dims[7]),
                            strict=True))
        mapping = _Mapping(info.batch_size, operands[:3])
        gradients = op(
            mapping.fold(grad_out, in_dims[0]), mapping.fold(grad_lse, in_dims[1], trailing=1),
            *(mapping.fold(*operand) for operand in operands[:3]), mapping.fold(out, in_dims[5]),
            mapping.fold(lse, in_dims[6], trailing=1), mapping.fold(*operands[3]), *options,
            output_mask=output_mask, block_classes=mapping.fold(classes, classes_dim), **named,
        )
        results = tuple(
            gradient.reshape(mapping.front(*operand).shape) if wanted else gradient
            for gradient, operand, wanted in zip(gradients, operands, output_mask, strict=False)
        ) + (gradients[4],)
        return results, tuple(0 if wanted else None for wanted in output_mask)

    return rule


def _register(name: str, make_rule: Callable[[Callable], Callable]) -> None:
    op = getattr(torch.ops.flash_mps, name).default
    rule = make_rule(op)

    def call(classes: Tensor | None, *args: Any, **named: Any) -> Any:
        return op(*args, block_classes=classes, **named)

    dropout_at = [argument.name for argument in op._schema.arguments].index("dropout_p")

    def kernel(*args: Any, **named: Any) -> Any:
        from torch._functorch.autograd_function import custom_function_call_vmap_helper
        from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

        for option in ("alibi_slopes", "sinks"):
            tensor = named.get(option)
            if tensor is not None and torch._C._functorch.is_batchedtensor(tensor):
                raise NotImplementedError(
                    f"flash_mps::{name}: torch.vmap over {option} is not supported"
                )
        if len(args) > dropout_at and args[dropout_at] != 0.0:
            raise NotImplementedError(
                f"flash_mps::{name}: torch.vmap with dropout_p above 0 is not supported"
            )
        interpreter: Any = retrieve_current_functorch_interpreter()
        classes = named.pop("block_classes", None)   # mapped arguments are positional
        return custom_function_call_vmap_helper(interpreter, rule, call, classes, *args, **named)

    _library.impl(name, kernel, "FuncTorchBatched")


@torch.library.register_vmap("flash_mps::mask_block_classes")
def _mask_block_classes_rule(info, in_dims, attn_mask):
    return torch.ops.flash_mps.mask_block_classes(attn_mask.movedim(in_dims[0], 0)), 0


_register("attention", _forward_rule)
_register("attention_with_lse", _forward_rule)
_register("attention_backward", _backward_rule)
