"""Scalar expressions: what a score_mod or a mask_mod computes for one pair of query and key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Names of what a pair has, in the order of a score_mod's arguments.
SCORE, INDICES = "score", ("b", "h", "q_idx", "kv_idx")

#: Sequences are shorter than this, so that most arithmetic of indices fits in 32 bits.
MAX_SEQLEN = 2**24
#: So are batch and heads.
MAX_BATCH = 2**20

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)

Bounds = tuple[int, int]
_RANGES = {torch.int64: (-(2**63), 2**63 - 1), torch.int32: (-(2**31), 2**31 - 1),
           torch.bool: (0, 1)}


@dataclass(frozen=True, eq=False)
class Value:
    """One scalar. Equal values of one `Expressions` are one object.

    op: "argument" (data: its name), "constant" (data: the number), "load" (data: which captured
    tensor; args: its indices) or a name of `operators.OPERATORS`.
    bounds: smallest and largest value of an integer; None of a float.
    """

    op: str
    args: tuple[Value, ...]
    dtype: torch.dtype
    data: Any = None
    bounds: Bounds | None = None

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS

    def is_constant(self, number: float) -> bool:
        return self.op == "constant" and self.data == number


class Expressions:
    """Makes values, each once. `captured` are the tensors that its loads read."""

    def __init__(self) -> None:
        self.captured: list[Tensor] = []
        self._values: dict[tuple, Value] = {}

    def make(self, op: str, *args: Value, dtype: torch.dtype, data: Any = None) -> Value:
        # 0.0 and -0.0, 1 and True are equal as keys; a NaN is not equal to itself.
        key = (op, tuple(map(id, args)), dtype, type(data), repr(data))
        if key not in self._values:
            bounds = _bounds(op, args, dtype, data) if dtype in _RANGES else None
            self._values[key] = Value(op, args, dtype, data, bounds)
        return self._values[key]

    def argument(self, name: str) -> Value:
        dtype = torch.float32 if name == SCORE else torch.int64
        return self.make("argument", dtype=dtype, data=name)

    def constant(self, number: float, dtype: torch.dtype) -> Value:
        kind = float if dtype in FLOATS else bool if dtype == torch.bool else int
        if dtype in FLOATS:   # as PyTorch's flex_attention, by vmap; what is too large is infinite
            number = torch.tensor(number, dtype=dtype).item()
        return self.make("constant", dtype=dtype, data=kind(number))

    def load(self, tensor: Tensor, indices: tuple[Value, ...]) -> Value:
        known = (i for i, other in enumerate(self.captured) if other is tensor)
        number = next(known, len(self.captured))
        if number == len(self.captured):
            self.captured.append(tensor)
        return self.make("load", *indices, dtype=tensor.dtype, data=number)

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        if value.dtype == dtype:
            return value
        if value.op == "constant" and (dtype in FLOATS or not value.is_float):
            rounded = torch.tensor(value.data, dtype=value.dtype).to(dtype).item()
            return self.constant(rounded, dtype)
        return self.make("cast", value, dtype=dtype)


def in_order(outputs: Iterable[Value]) -> Iterator[Value]:
    """The values that `outputs` depend on, themselves included, each after its arguments."""
    seen: set[int] = set()
    stack = [(value, False) for value in reversed(list(outputs))]
    while stack:
        value, has_arguments = stack.pop()
        if has_arguments:
            yield value
        elif id(value) not in seen:
            seen.add(id(value))
            stack.append((value, True))
            stack.extend((argument, False) for argument in reversed(value.args))


def _bounds(op: str, args: tuple[Value, ...], dtype: torch.dtype, data: Any) -> Bounds:
    """What an integer or boolean value lies within: the whole range of its dtype if it may wrap."""
    whole = _RANGES[dtype]
    if op == "argument":
        return 0, (MAX_BATCH if data in ("b", "h") else MAX_SEQLEN) - 1
    if op == "constant":
        return int(data), int(data)
    ranges = [argument.bounds for argument in args]
    if dtype == torch.bool or op not in _INTERVALS or any(one is None for one in ranges):
        return whole
    low, high = _INTERVALS[op](*ranges)
    return (low, high) if whole[0] <= low and high <= whole[1] else whole


def _corners(function: Any) -> Any:
    """Bounds of a function that is monotonic in each argument."""

    def bounds(a: Bounds, b: Bounds) -> Bounds:
        values = [function(x, y) for x in a for y in b]
        return min(values), max(values)

    return bounds


def _magnitude(a: Bounds) -> int:
    return max(abs(a[0]), abs(a[1]))


def _remainder(a: Bounds, b: Bounds) -> Bounds:
    """The sign is that of the divisor; a divisor of 0 gives 0."""
    return min(0, b[0] + 1), max(0, b[1] - 1)


def _and(a: Bounds, b: Bounds) -> Bounds:
    if a[0] >= 0 or b[0] >= 0:
        return 0, min(x[1] for x in (a, b) if x[0] >= 0)
    return _or(a, b)


def _or(a: Bounds, b: Bounds) -> Bounds:
    """All bits that either may have."""
    bits = max(_magnitude(a), _magnitude(b)).bit_length()
    return (0 if min(a[0], b[0]) >= 0 else -(2**bits)), 2**bits - 1


def _shift_left(a: Bounds, b: Bounds) -> Bounds:
    if b[0] < 0 or b[1] > 63:
        return -(2**64), 2**64   # beyond every range
    return _corners(lambda x, y: x << y)(a, b)


_INTERVALS = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _corners(lambda x, y: x * y),
    "neg": lambda a: (-a[1], -a[0]),
    "abs": lambda a: (0 if a[0] <= 0 <= a[1] else min(map(abs, a)), _magnitude(a)),
    "minimum": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "maximum": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "clamp_min": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "clamp_max": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "where": lambda _, a, b: (min(a[0], b[0]), max(a[1], b[1])),
    "cast": lambda a: a,
    # Dividing makes nothing larger, but for the rounding down; a divisor of 0 gives 0.
    "floor_divide": lambda a, b: (-_magnitude(a) - (a[0] < 0 or b[0] < 0), _magnitude(a)),
    "trunc_divide": lambda a, b: (-_magnitude(a), _magnitude(a)),
    "remainder": _remainder,
    "fmod": lambda a, b: (-_magnitude(a), _magnitude(a)),
    "bitwise_and": _and,
    "bitwise_or": _or,
    "bitwise_xor": _or,
    "bitwise_not": lambda a: (~a[1], ~a[0]),
    "shift_left": _shift_left,
    "shift_right": lambda a, b: (min(a[0], 0), max(a[1], 0)),
}
