"""The operators of scalar expressions: as MSL, as torch on whole tensors, and derivatives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from torch_flash_mps.flex.values import Expressions, Value

#: From the gradient of a value to those of its arguments; None is zero.
Gradient = Callable[[Expressions, Value, Value], tuple[Value | None, ...]]


@dataclass(frozen=True)
class Operator:
    msl: str   # of its arguments {0}, {1}, {2}, which have the type of the result or a common one
    torch: Callable[..., torch.Tensor]
    gradient: Gradient | None = None   # None: zero everywhere


class _Gradients:
    """Shorthands for derivatives: float values of one dtype."""

    def __init__(self, make: Expressions, dtype: torch.dtype) -> None:
        self.expressions = make
        self.dtype = dtype

    def __call__(self, op: str, *args: Value) -> Value:
        return self.expressions.make(op, *args, dtype=self.dtype)

    def number(self, number: float) -> Value:
        return self.expressions.constant(number, self.dtype)

    def times(self, g: Value, factor: Value) -> Value:
        if g.is_constant(1.0):
            return factor
        return g if factor.is_constant(1.0) else self("mul", g, factor)

    def where(self, relation: str, a: Value, b: Value, yes: Value, no: Value) -> Value:
        condition = self.expressions.make(relation, a, b, dtype=torch.bool)
        return self("where", condition, yes, no)


def _gradient(function: Callable[..., tuple[Value | None, ...]]) -> Gradient:
    """Of `function(shorthands, g, result, *args)`."""

    def gradient(make: Expressions, node: Value, g: Value) -> tuple[Value | None, ...]:
        return function(_Gradients(make, node.dtype), g, node, *node.args)

    return gradient


def _of_divisor(_, g, y, a, b):
    return _("neg", _.times(_.times(g, y), _("div", _.number(1.0), b)))


def _of_abs(_, g, y, x):
    zero = _.number(0.0)
    return (_.where("gt", x, zero, g, _.where("lt", x, zero, _("neg", g), zero)),)


def _of_extremum(loses: str) -> Gradient:
    """Equal arguments share the gradient."""

    def gradient(_, g, y, a, b):
        zero, half = _.number(0.0), _.times(g, _.number(0.5))
        return (_.where("eq", a, b, half, _.where(loses, a, b, zero, g)),
                _.where("eq", a, b, half, _.where(loses, b, a, zero, g)))

    return _gradient(gradient)


def _of_limit(keeps: str) -> Gradient:
    """Of a clamp: the value has the gradient as long as it keeps within the limit."""

    def gradient(_, g, y, x, limit):
        zero = _.number(0.0)
        return (_.where(keeps, x, limit, g, zero), _.where(keeps, x, limit, zero, g))

    return _gradient(gradient)


def _of_remainder(rounded: str) -> Gradient:
    return _gradient(lambda _, g, y, a, b: (g, _("neg", _.times(g, _(rounded, a, b)))))


def _of_pow(_, g, y, a, b):
    zero, one = _.number(0.0), _.number(1.0)
    of_base = _.times(g, _("mul", b, _("pow", a, _("sub", b, one))))
    return (_.where("eq", b, zero, zero, of_base),
            _.where("eq", a, zero, zero, _.times(g, _("mul", y, _("log", a)))))


def _of_where(_, g, y, condition, a, b):
    return None, _("where", condition, g, _.number(0.0)), _("where", condition, _.number(0.0), g)


def _of_cast(make: Expressions, node: Value, g: Value) -> tuple[Value | None, ...]:
    (source,) = node.args
    return (make.cast(g, source.dtype) if source.is_float else None,)


def _floor_divide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _guarded(a, b, lambda x, y: torch.div(x, y, rounding_mode="floor"))


def _guarded(a: torch.Tensor, b: torch.Tensor, divide: Callable) -> torch.Tensor:
    """An integer divided by 0 is 0."""
    if a.is_floating_point():
        return divide(a, b)
    is_zero = b == 0
    return torch.where(is_zero, 0, divide(a, torch.where(is_zero, 1, b)))


def _sigmoid_gradient(_, g, y, x):
    return (_.times(g, _("mul", y, _("sub", _.number(1.0), y))),)


OPERATORS: dict[str, Operator] = {
    "add": Operator("{0} + {1}", torch.add, _gradient(lambda _, g, y, a, b: (g, g))),
    "sub": Operator("{0} - {1}", torch.sub, _gradient(lambda _, g, y, a, b: (g, _("neg", g)))),
    "mul": Operator("{0} * {1}", torch.mul,
                    _gradient(lambda _, g, y, a, b: (_.times(g, b), _.times(g, a)))),
    "div": Operator("{0} / {1}", torch.div,
                    _gradient(lambda _, g, y, a, b: (_("div", g, b), _of_divisor(_, g, y, a, b)))),
    "neg": Operator("-{0}", torch.neg, _gradient(lambda _, g, y, x: (_("neg", g),))),
    "abs": Operator("user_abs({0})", torch.abs, _gradient(_of_abs)),
    "minimum": Operator("user_minimum({0}, {1})", torch.minimum, _of_extremum("gt")),
    "maximum": Operator("user_maximum({0}, {1})", torch.maximum, _of_extremum("lt")),
    "clamp_min": Operator("user_maximum({0}, {1})", torch.maximum, _of_limit("ge")),
    "clamp_max": Operator("user_minimum({0}, {1})", torch.minimum, _of_limit("le")),
    "exp": Operator("metal::precise::exp({0})", torch.exp,
                    _gradient(lambda _, g, y, x: (_.times(g, y),))),
    "log": Operator("metal::precise::log({0})", torch.log,
                    _gradient(lambda _, g, y, x: (_("div", g, x),))),
    "tanh": Operator("metal::precise::tanh({0})", torch.tanh, _gradient(lambda _, g, y, x: (
        _.times(g, _("sub", _.number(1.0), _("mul", y, y))),))),
    "sigmoid": Operator("1.0f / (1.0f + metal::precise::exp(-{0}))", torch.sigmoid,
                        _gradient(_sigmoid_gradient)),
    "sqrt": Operator("metal::precise::sqrt({0})", torch.sqrt, _gradient(lambda _, g, y, x: (
        _("div", _.times(g, _.number(0.5)), y),))),
    "pow": Operator("metal::precise::pow({0}, {1})", torch.pow, _gradient(_of_pow)),
    "where": Operator("{0} ? {1} : {2}", torch.where, _gradient(_of_where)),
    "floor_divide": Operator("user_floor_divide({0}, {1})", _floor_divide),
    "trunc_divide": Operator("user_trunc_divide({0}, {1})", lambda a, b: _guarded(
        a, b, lambda x, y: torch.div(x, y, rounding_mode="trunc"))),
    "remainder": Operator("user_remainder({0}, {1})", lambda a, b: _guarded(a, b, torch.remainder),
                          _of_remainder("floor_divide")),
    "fmod": Operator("user_fmod({0}, {1})", lambda a, b: _guarded(a, b, torch.fmod),
                     _of_remainder("trunc_divide")),
    "bitwise_and": Operator("{0} & {1}", torch.bitwise_and),
    "bitwise_or": Operator("{0} | {1}", torch.bitwise_or),
    "bitwise_xor": Operator("{0} ^ {1}", torch.bitwise_xor),
    "bitwise_not": Operator("~{0}", torch.bitwise_not),
    "shift_left": Operator("user_shift_left({0}, {1})", torch.bitwise_left_shift),
    "shift_right": Operator("user_shift_right({0}, {1})", torch.bitwise_right_shift),
    "logical_and": Operator("{0} && {1}", torch.logical_and),
    "logical_or": Operator("{0} || {1}", torch.logical_or),
    "logical_xor": Operator("{0} != {1}", torch.logical_xor),
    "logical_not": Operator("!{0}", torch.logical_not),
    "eq": Operator("{0} == {1}", torch.eq),
    "ne": Operator("{0} != {1}", torch.ne),
    "lt": Operator("{0} < {1}", torch.lt),
    "le": Operator("{0} <= {1}", torch.le),
    "gt": Operator("{0} > {1}", torch.gt),
    "ge": Operator("{0} >= {1}", torch.ge),
    "cast": Operator("{0}", lambda x: x, _of_cast),
}
