"""The call: inputs are judged, functions become a program, kernels or plain torch run it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torch_flash_mps._extension import extension
from torch_flash_mps.flex.block_classes import block_classes
from torch_flash_mps.flex.cache import program_of
from torch_flash_mps.flex.captured_gradient import captured_gradients
from torch_flash_mps.flex.checks import check_call, check_types
from torch_flash_mps.flex.eager import attend
from torch_flash_mps.flex.program import Program

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True)
class _Call:
    """What a call is beside its tensors."""

    program: Program
    classes: Tensor | None
    scale: float
    enable_gqa: bool

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.scale, "enable_gqa": self.enable_gqa}


class _FlexAttention(torch.autograd.Function):
    """Of (call, query, key, value, *captured)."""

    @staticmethod
    def forward(call: _Call, query: Tensor, key: Tensor, value: Tensor, *captured: Tensor):
        return torch.ops.flash_mps.flex_attention(
            query, key, value, captured, call.program.code, call.classes, **call.options,
            for_backward=True,
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        ctx.call, *tensors = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None):
        if grad_out is None and grad_lse is None:
            return (None,) * len(ctx.needs_input_grad)
        call, wanted = ctx.call, ctx.needs_input_grad[1:]
        return None, *_FlexAttentionBackward.apply(call, wanted, grad_out, grad_lse,
                                                   *ctx.saved_tensors)


class _FlexAttentionBackward(torch.autograd.Function):
    """Of (call, which gradients, grad_out, grad_lse, query, key, value, *captured, out, lse)."""

    @staticmethod
    def forward(
        call: _Call, wanted: tuple[bool, ...], grad_out: Tensor | None, grad_lse: Tensor | None,
        *saved: Tensor,
    ) -> tuple[Tensor | None, ...]:
        query, key, value, *captured, out, lse = saved
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        gradients: list[Tensor | None] = [None] * len(wanted)
        if any(wanted[:3]):
            gradients[:3] = torch.ops.flash_mps.flex_attention_backward(
                grad_out, grad_lse, out, lse, query, key, value, captured, call.program.code,
                call.classes, **call.options, output_mask=wanted[:3],
            )
        if any(wanted[3:]):
            delta = (grad_out.float() * out.float()).sum(-1)
            delta = delta if grad_lse is None else delta - grad_lse
            program = replace(call.program, captured=tuple(captured))
            gradients[3:] = captured_gradients(
                program, (query, key, value), call.classes, call.scale, lse, grad_out, delta)
        return tuple(one if is_wanted else None
                     for one, is_wanted in zip(gradients, wanted, strict=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):
        raise RuntimeError("flex_attention: double backward is not supported")


@torch.compiler.disable(reason="torch_flash_mps.flex_attention traces its functions itself; "
                               "torch.compile without fullgraph=True runs it between its graphs")
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with a score and a visibility that the caller defines, and with gradients.

    Arguments as those of ``torch.nn.attention.flex_attention.flex_attention``. Both functions are
    traced with torch.fx and compiled into the kernels of :func:`torch_flash_mps.attention`, the
    derivative included: nothing of the size of the score matrix is kept.

    Shapes (layout ``[B, H, S, D]``):
        query: ``[batch, num_heads_q, seqlen_q, head_dim]``; key: ``[batch, num_heads_kv, seqlen_k,
        head_dim]``; value: ``[batch, num_heads_kv, seqlen_k, head_dim_v]``; returns
        ``[batch, num_heads_q, seqlen_q, head_dim_v]``.

    Dtypes: float32, float16 or bfloat16, one for all three; scores are float32.

    Args:
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx) -> score`` on scalar tensors: float32 and
            int64. It may use arithmetic, comparisons, where, masked_fill, minimum, maximum, clamp,
            abs, exp, log, tanh, sigmoid, sqrt, powers, integer, logical and bitwise operators,
            casts, and up to ten captured tensors together with mask_mod's, indexed down to one
            element by the indices or arithmetic on them. Captured: any rank and strides, float32,
            float16, bfloat16, int64, int32 or bool, on query's device or a scalar on the CPU.
            A result of -inf hides the pair.
        block_mask: of ``create_block_mask``, BLOCK_SIZE in multiples of 32. Blocks that it leaves
            out are skipped; its mask_mod is asked in partial blocks only.
        scale: factor of the scores; ``None`` means ``1 / sqrt(head_dim)``.
        enable_gqa: required where num_heads_q is a multiple of num_heads_kv.
        return_lse: also return the natural log-sum-exp, float32 ``[batch, num_heads_q, seqlen_q]``.

    An index below 0 counts from the end; one beyond either end reads the element there (PyTorch
    raises an error on the CPU, and on a GPU does what it may).

    Gradients: for query, key, value, also through the log-sum-exp, and for captured float tensors;
    those take about 50 bytes for each of 2**20 pairs at a time (but for at least one query of a
    group's heads), and have the same bits on every run. None through an index, a comparison or
    mask_mod. Double backward and forward mode are errors.

    A query that sees no key gives 0 and an lse of -inf. A key that no query sees never contributes.

    A pipeline is compiled for each text of both functions: Python numbers are part of it, values
    and sizes of captured tensors are not. A number that changes often belongs into such a tensor.
    Functions that were seen before, and reach what they reached before, are not traced again.

    CPU tensors: the same through plain torch operators, with the score matrix in memory.

    Raises:
        ValueError, RuntimeError: inputs that do not fit together.
        NotImplementedError: an operator, dtype or BLOCK_SIZE that is not supported.

    Example:
        >>> import torch, torch_flash_mps
        >>> q = k = v = torch.randn(1, 2, 5, 8)
        >>> def relative(score, b, h, q_idx, kv_idx):
        ...     return score - (q_idx - kv_idx).abs()
        >>> torch_flash_mps.flex_attention(q, k, v, relative).shape
        torch.Size([1, 2, 5, 8])
    """
    extension()
    check_types(query, key, value, score_mod, block_mask)
    query, key, value = _in_autocast_dtype(query, key, value)
    check_call(query, key, value, block_mask, enable_gqa)
    mask_mod = None if block_mask is None else block_mask.mask_mod
    program = program_of(score_mod, mask_mod, query.device)
    classes = block_classes(block_mask, query.size(2), key.size(2))
    if scale is None:
        scale = 1.0 / math.sqrt(max(query.size(3), 1))
    if query.device.type == "cpu":
        out, lse = attend(program, query, key, value, classes, scale)
    else:
        out, lse = _run(_Call(program, classes, scale, enable_gqa), query, key, value)
    return (out, lse) if return_lse else out


def _run(call: _Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    captured = [tensor.to(query.device) for tensor in call.program.captured]
    tensors = (query, key, value, *captured)
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise NotImplementedError("flex_attention: forward-mode differentiation is not supported")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _FlexAttention.apply(call, *tensors)
    return torch.ops.flash_mps.flex_attention(
        query, key, value, captured, call.program.code, call.classes, **call.options)


def _in_autocast_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(tensor.to(dtype) for tensor in tensors)
