"""A score_mod and a mask_mod, traced, differentiated and written as Metal source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_flash_mps.flex import msl
from torch_flash_mps.flex.derivative import derivatives
from torch_flash_mps.flex.trace import check_captured, trace
from torch_flash_mps.flex.values import SCORE, Expressions, Value, in_order

#: Buffers that a kernel has for them.
MAX_CAPTURED = 10


@dataclass(frozen=True)
class Program:
    """What one pair of functions computes for a pair of query and key.

    loads: the loads of score_mod through which its result depends on a float tensor, and
    partials: the derivative of the result by each of them.
    code: the Metal source; it does not depend on sizes, strides or values of `captured`.
    """

    score: Value
    mask: Value
    loads: tuple[Value, ...]
    partials: tuple[Value, ...]
    captured: tuple[Tensor, ...]
    code: str


def make_program(
    score_mod: Callable[..., Tensor] | None, mask_mod: Callable[..., Tensor] | None,
    device: torch.device,
) -> Program:
    make = Expressions()
    score, mask = make.argument(SCORE), make.constant(True, torch.bool)
    if score_mod is not None:
        score = trace("score_mod", score_mod, True, device, make)
    if mask_mod is not None:
        mask = trace("mask_mod", mask_mod, False, device, make)
    captured = make.captured
    check_captured(captured, device, MAX_CAPTURED)
    loads = [value for value in in_order([score]) if value.op == "load" and value.is_float]
    slope, *partials = derivatives(make, score, [make.argument(SCORE), *loads])
    needed = [(load, partial) for load, partial in zip(loads, partials, strict=True)
              if not partial.is_constant(0.0)]
    return Program(
        score=score, mask=mask, loads=tuple(load for load, _ in needed),
        partials=tuple(partial for _, partial in needed), captured=tuple(captured),
        code=msl.header(score, slope, mask, captured),
    )
