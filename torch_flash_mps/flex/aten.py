"""ATen operators on scalars -> scalar expressions. What is not here is an error with its name."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
from torch import fx

from torch_flash_mps.flex.calls import Call, Element, Lowered
from torch_flash_mps.flex.values import FLOATS, INTEGERS, Expressions, Value


def lower(name: str, make: Expressions, node: fx.Node, lowered: dict) -> Lowered:
    call = Call(name, make, node, lowered)
    packet = _packet(node)
    rule = _RULES.get(packet)
    if rule is not None:
        return rule(call)
    # In place: from here on torch.fx has the result where the function has the changed scalar.
    rule = _RULES.get(packet.replace("__i", "__", 1) if packet.startswith("__i")
                      else packet.removesuffix("_"))
    if rule is None:
        raise call.refuse()
    if not _changes_own_scalar(node):
        raise call.refuse(" on other than a scalar of its own, without views and of the "
                          "operands' dtype")
    return rule(call)


def _packet(node: fx.Node) -> str:
    """The name of an ATen operator without its overload."""
    return str(getattr(node.target, "overloadpacket", None)).removeprefix("aten.")


_VIEWS = ("alias", "detach", "select")


def _changes_own_scalar(node: fx.Node) -> bool:
    """Whether an operator in place changes a scalar of which the function has no other view."""
    changed, *others = (one for one in node.args if isinstance(one, fx.Node))
    dtypes = [one.meta["val"].dtype for one in (changed, *others)]
    return (changed.op == "call_function" and _packet(changed) not in _VIEWS
            and not any(_packet(user) in _VIEWS for user in changed.users)
            and reduce(torch.promote_types, dtypes) == dtypes[0])


def _binary(op: str) -> Callable[[Call], Value]:
    return lambda call: call.arithmetic(op, *call.args[:2])


def _unary(op: str) -> Callable[[Call], Value]:
    return lambda call: call.arithmetic(op, call.args[0])


def _comparison(op: str) -> Callable[[Call], Value]:
    return lambda call: call.comparison(op, *call.args[:2])


def _scaled(op: str, is_reversed: bool = False) -> Callable[[Call], Value]:
    """a + alpha * b, a - alpha * b, b - alpha * a."""

    def rule(call: Call) -> Value:
        a, b = call.args[:2]
        if is_reversed:
            a, b = b, a
        alpha = call.argument(2, "alpha", 1)
        dtype = call.own_dtype()
        right = call.value(b, dtype)
        if alpha != 1:
            right = call.result("mul", right, call.value(alpha, dtype))
        left = call.value(a, dtype)
        if dtype == torch.bool:
            return call.result("logical_or", left, right)
        return call.result(op, left, right)

    return rule


def _product(call: Call) -> Value:
    return call.arithmetic("logical_and" if call.dtype == torch.bool else "mul",
                           *call.args[:2])


def _division(call: Call) -> Value:
    mode = str(call.node.kwargs.get("rounding_mode"))
    op = {"None": "div", "floor": "floor_divide", "trunc": "trunc_divide"}[mode]
    return call.arithmetic(op, *call.args[:2])


def _bits(op: str) -> Callable[[Call], Value]:
    """A bitwise operator, which on booleans is the logical one."""

    def rule(call: Call) -> Value:
        kind = "logical" if call.dtype == torch.bool else "bitwise"
        return call.arithmetic(f"{kind}_{op}", *call.args[:2])

    return rule


def _logical(op: str) -> Callable[[Call], Value]:
    return lambda call: call.result(
        op, *(call.value(argument, torch.bool) for argument in call.args))


def _clamp(call: Call) -> Value:
    low, high = call.argument(1, "min"), call.argument(2, "max")
    dtype = call.own_dtype()
    value = call.value(call.args[0], dtype)
    if low is not None:
        value = call.result("clamp_min", value, call.value(low, dtype))
    return value if high is None else call.result("clamp_max", value, call.value(high, dtype))


def _limit(op: str) -> Callable[[Call], Value]:
    return lambda call: call.arithmetic(op, call.args[0],
                                        call.argument(1, op.removeprefix("clamp_")))


def _where(call: Call) -> Value:
    if len(call.args) != 3:
        raise call.refuse(" with one argument")
    condition, a, b = call.args
    dtype = call.own_dtype()
    return call.result("where", call.value(condition, torch.bool), call.value(a, dtype),
                       call.value(b, dtype))


def _masked_fill(call: Call) -> Value:
    x, mask, number = call.args
    dtype = call.own_dtype()
    return call.result("where", call.value(mask, torch.bool), call.value(number, dtype),
                       call.value(x, dtype))


def _power(call: Call) -> Value:
    base, exponent = call.args
    dtype = call.own_dtype()
    if not isinstance(exponent, (int, float)):
        if dtype in INTEGERS:
            raise call.refuse(" of integers with a tensor as exponent")
        return call.arithmetic("pow", base, exponent)
    value, one = call.value(base, dtype), call.make.constant(1, dtype)
    if dtype in FLOATS and exponent in (0.5, -0.5):
        root = call.result("sqrt", value)
        return root if exponent > 0 else call.result("div", one, root)
    if exponent != int(exponent) or not (0 if dtype in INTEGERS else -4) <= exponent <= 4:
        if dtype in INTEGERS:
            raise call.refuse(f" of integers with the exponent {exponent}")
        return call.arithmetic("pow", base, exponent)
    power = one
    for i in range(abs(int(exponent))):
        power = call.result("mul", power, value) if i else value
    return power if exponent >= 0 else call.result("div", one, power)


def _exp2(call: Call) -> Value:
    return call.arithmetic("pow", 2.0, call.args[0])


def _reciprocal(call: Call) -> Value:
    dtype = call.own_dtype()
    return call.result("div", call.make.constant(1.0, dtype), call.value(call.args[0], dtype))


def _rsqrt(call: Call) -> Value:
    dtype = call.own_dtype()
    return call.result("div", call.make.constant(1.0, dtype), call.arithmetic("sqrt",
                                                                              call.args[0]))


def _copy(call: Call) -> Lowered:
    source = call.lowered[call.args[0]]
    if isinstance(source, Element) and None in source.indices:
        if call.dtype == source.tensor.dtype:
            return source
        raise call.refuse(" on a whole captured tensor")
    return call.value(call.args[0], call.own_dtype())


def _number_in_function(call: Call) -> Value:
    """torch.tensor(number) within the function."""
    source = call.lowered[call.args[0]]
    if isinstance(source, Element) and source.tensor.dim() == 0:
        return call.make.constant(source.tensor.item(), call.own_dtype())
    raise call.refuse(" of a tensor with dimensions")


def _filled(position: int | float, is_number: bool = False) -> Callable[[Call], Value]:
    """A scalar made of a number: the argument at `position`, or the number itself."""

    def rule(call: Call) -> Value:
        if call.node.meta["val"].dim() != 0:
            raise call.refuse(" with dimensions")
        number = position if is_number else call.args[int(position)]
        return call.value(number, call.own_dtype())

    return rule


def _index(call: Call) -> Element:
    source, indices = call.args
    element = call.lowered[source]
    if isinstance(element, Value):
        raise call.refuse(" on what is not a captured tensor")
    free = [dim for dim, index in enumerate(element.indices) if index is None]
    found = list(element.indices)
    for position, index in enumerate(indices):
        if index is None:
            continue
        if index.meta["val"].dim() != 0 or index.meta["val"].dtype not in INTEGERS:
            raise call.refuse(" with an index that is not an integer scalar")
        found[free[position]] = call.value(index)
    return Element(element.tensor, tuple(found))


def _select(call: Call) -> Element:
    source, dim, index = call.args
    element = call.lowered[source]
    if isinstance(element, Value):
        raise call.refuse(" on what is not a captured tensor")
    free = [one for one, known in enumerate(element.indices) if known is None]
    found = list(element.indices)
    found[free[dim]] = call.make.constant(index, torch.int64)
    return Element(element.tensor, tuple(found))


_RULES: dict[str, Callable[[Call], Lowered]] = {
    "add": _scaled("add"), "sub": _scaled("sub"), "rsub": _scaled("sub", is_reversed=True),
    "mul": _product, "div": _division, "floor_divide": _binary("floor_divide"),
    "remainder": _binary("remainder"), "fmod": _binary("fmod"), "neg": _unary("neg"),
    "abs": _unary("abs"), "exp": _unary("exp"), "exp2": _exp2, "log": _unary("log"),
    "tanh": _unary("tanh"), "sigmoid": _unary("sigmoid"), "sqrt": _unary("sqrt"), "rsqrt": _rsqrt,
    "reciprocal": _reciprocal, "pow": _power, "minimum": _binary("minimum"),
    "maximum": _binary("maximum"), "clamp": _clamp, "clamp_min": _limit("clamp_min"),
    "clamp_max": _limit("clamp_max"), "where": _where, "masked_fill": _masked_fill,
    **{op: _comparison(op) for op in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{f"logical_{op}": _logical(f"logical_{op}") for op in ("and", "or", "xor", "not")},
    **{f"bitwise_{op}": _bits(op) for op in ("and", "or", "xor", "not")},
    **{f"__{op}__": _bits(op) for op in ("and", "or", "xor")},
    "__lshift__": _binary("shift_left"), "__rshift__": _binary("shift_right"),
    "bitwise_left_shift": _binary("shift_left"), "bitwise_right_shift": _binary("shift_right"),
    **dict.fromkeys(("_to_copy", "clone", "detach", "alias"), _copy),
    **dict.fromkeys(("lift_fresh", "lift_fresh_copy"), _number_in_function),
    "scalar_tensor": _filled(0), "full": _filled(1), "full_like": _filled(1),
    "new_full": _filled(2),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), _filled(0, is_number=True)),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _filled(1, is_number=True)),
    "index": _index, "select": _select,
}
