"""Whether a function that was traced before would trace the same again."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

_CONSTANTS = (int, float, complex, str, bytes, type(None), type(Ellipsis))
_MAX_ITEMS = 64


class Unknowable(Exception):
    """A function reaches something of which no one can say whether it changed."""


def snapshot(function: Callable | None) -> list:
    """What a function is made of and reaches: code, closure, defaults, globals, attributes.

    Two functions with equal snapshots trace alike. Tensors count by identity, dtype and shape, for
    their values are read when a kernel runs. Other objects count by identity, and by the attributes
    that the code names. All are held weakly: a snapshot keeps nothing alive.
    """
    found: list = []
    _visit(function, frozenset(), found, set())
    return found


def code_of(function: Any) -> types.CodeType | None:
    """The code that calling it runs first, if that is Python."""
    while isinstance(function, partial):
        function = function.func
    if not isinstance(function, (types.FunctionType, types.MethodType)):
        function = vars(type(function)).get("__call__", function)
    return getattr(function, "__code__", None)


class _Same:
    """An object by identity."""

    def __init__(self, value: Any) -> None:
        try:
            self._get: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._get = lambda: value

    def __eq__(self, other: object) -> bool:
        own = self._get()
        return isinstance(other, _Same) and own is not None and own is other._get()

    __hash__ = None  # type: ignore[assignment]


def _visit(value: Any, names: frozenset[str], found: list, seen: set[int]) -> None:
    """Appends what `value` is; `names` are those that the code at hand looks up."""
    if isinstance(value, _CONSTANTS):
        found.append((type(value), repr(value)))   # tells 0.0 from -0.0, and NaN is itself
    elif isinstance(value, Tensor):
        found += [_Same(value), value.dtype, tuple(value.shape)]
    elif isinstance(value, (tuple, list, dict)):
        _visit_items(value, names, found, seen)
    elif id(value) in seen:
        found.append("seen")
    else:
        seen.add(id(value))
        _visit_object(value, names, found, seen)


def _visit_object(value: Any, names: frozenset[str], found: list, seen: set[int]) -> None:
    if isinstance(value, types.FunctionType):
        _visit_function(value, found, seen)
    elif isinstance(value, types.MethodType):
        _visit(value.__func__, names, found, seen)
        _visit(value.__self__, _names(code_of(value)), found, seen)
    elif isinstance(value, partial):
        for part in (value.func, value.args, value.keywords):
            _visit(part, names, found, seen)
    elif isinstance(value, (set, frozenset)) or hasattr(value, "__next__"):
        raise Unknowable
    else:
        found.append(_Same(value))
        is_torch = isinstance(value, types.ModuleType) and value.__name__.startswith("torch")
        if not is_torch and not isinstance(value, (type, types.BuiltinFunctionType)):
            _visit_attributes(value, names | _names(code_of(value)), found, seen)


def _visit_items(value: Any, names: frozenset[str], found: list, seen: set[int]) -> None:
    if len(value) > _MAX_ITEMS:
        raise Unknowable
    found += [type(value), len(value)]
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        found.append(repr(key))
        _visit(item, names, found, seen)


def _visit_function(value: types.FunctionType, found: list, seen: set[int]) -> None:
    found.append(value.__code__)
    if (value.__module__ or "").startswith("torch.") and value.__closure__ is None:
        return
    names = _names(value.__code__)
    for cell in value.__closure__ or ():
        _visit(cell.cell_contents, names, found, seen)
    for part in (value.__defaults__, value.__kwdefaults__):
        _visit(part, names, found, seen)
    for name in sorted(names & value.__globals__.keys()):
        _visit(value.__globals__[name], names, found, seen)


def _visit_attributes(value: Any, names: frozenset[str], found: list, seen: set[int]) -> None:
    for name in sorted(names):
        attribute = getattr(value, name, _Same)   # which stands for: none
        found.append(name)
        _visit(attribute, names, found, seen)


def _names(code: types.CodeType | None) -> frozenset[str]:
    """What code looks up, that of the functions which it defines too."""
    if code is None:
        return frozenset()
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return frozenset(code.co_names).union(*map(_names, inner))
