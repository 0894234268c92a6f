"""Whether a function that was traced before would trace the same again."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from functools import lru_cache, partial
from numbers import Number
from typing import Any

from torch import Tensor, nn

_CONSTANTS = (Number, str, bytes, range, type(None), type(Ellipsis))
_MAX_ITEMS, _MAX_FOUND = 64, 2000


class Unknowable(Exception):
    """A function reaches something of which no one can say whether it changed."""


def snapshot(function: Callable | None) -> list:
    """What a function is made of and reaches: code, closure, defaults, globals, attributes.

    Two functions with equal snapshots trace alike. Tensors count by identity, dtype and shape, for
    their values are read when a kernel runs. Other objects count by identity, and by the attributes
    that any of the code names. All are held weakly: a snapshot keeps nothing alive.
    """
    names: frozenset[str] = frozenset()
    while True:
        visit = _Visit(names)
        visit(function)
        if visit.named <= names:
            return visit.found
        names |= visit.named   # of code that was found late: the objects before it may have them


def code_of(function: Any) -> types.CodeType | None:
    """The code that calling it runs first, if that is Python."""
    while isinstance(function, partial):
        function = function.func
    if isinstance(function, nn.Module):
        function = function.forward
    elif callable(function) and not isinstance(function, (types.FunctionType, types.MethodType)):
        function = type(function).__call__
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


class _Visit:
    """One way through all that a function reaches, with the names that are looked up in objects."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = sorted(names)
        self.named: set[str] = set()   # by the code that was found
        self.found: list = []
        self._seen: dict[int, tuple[Any, int]] = {}   # alive, so that no id comes twice

    def __call__(self, value: Any) -> None:
        """Appends what `value` is."""
        if len(self.found) > _MAX_FOUND:
            raise Unknowable
        if isinstance(value, _CONSTANTS):
            self.found.append((type(value), repr(value)))   # tells 0.0 from -0.0; NaN is itself
        elif isinstance(value, Tensor):
            self.found += [_Same(value), value.dtype, tuple(value.shape)]
        elif isinstance(value, types.MethodType):
            self(value.__func__)
            self(value.__self__)
        elif id(value) in self._seen:
            self.found.append(self._seen[id(value)][1])
        else:
            self._seen[id(value)] = (value, len(self._seen))
            self._visit_new(value)

    def _visit_new(self, value: Any) -> None:
        if isinstance(value, types.FunctionType):
            self._visit_function(value)
        elif isinstance(value, (tuple, list, dict)):
            self._visit_items(value)
        elif isinstance(value, partial):
            for part in (value.func, value.args, value.keywords):
                self(part)
        elif isinstance(value, (property, staticmethod, classmethod)):
            self(value.fget if isinstance(value, property) else value.__func__)
        elif isinstance(value, type):
            self._visit_class(value)
        elif any(name in vars(one) for one in type(value).__mro__
                 for name in ("__getitem__", "__iter__", "__next__")):
            raise Unknowable   # a set, an array, a ParameterList, a generator: what is in it?
        else:
            self.found.append(_Same(value))
            if not _is_of_torch(value):
                self._visit_attributes(value)

    def _visit_items(self, value: tuple | list | dict) -> None:
        if len(value) > _MAX_ITEMS:
            raise Unknowable
        self.found += [type(value), len(value)]
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            self.found.append(repr(key))
            self(item)

    def _visit_function(self, value: types.FunctionType) -> None:
        self.found.append(value.__code__)
        if _is_of_torch(value) and value.__closure__ is None:
            return
        names = _names(value.__code__)
        self.named |= names
        for cell in value.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError as error:   # nothing was assigned to it yet
                raise Unknowable from error
            self(content)
        for part in (value.__defaults__, value.__kwdefaults__, vars(value)):
            self(part)
        for name in sorted(names & value.__globals__.keys()):
            self(value.__globals__[name])

    def _visit_class(self, value: type) -> None:
        self.found.append(_Same(value))
        for one in value.__mro__:
            if one.__module__ != "builtins" and not _is_of_torch(one):
                for name in self.names:
                    if name in vars(one):
                        self.found.append(name)
                        self(vars(one)[name])

    def _visit_attributes(self, value: Any) -> None:
        code = code_of(value)
        if code is not None:   # it is called
            self(value.forward if isinstance(value, nn.Module) else type(value).__call__)
        for name in self.names:
            try:
                attribute = getattr(value, name)
            except Exception:   # then no code that runs has it
                continue
            self.found.append(name)
            self(attribute)


def _is_of_torch(value: Any) -> bool:
    """Whether it is a module, a class or a function of torch's own."""
    if isinstance(value, types.ModuleType):
        name = value.__name__
    elif isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        name = value.__module__ or ""
    else:
        return False
    return name.partition(".")[0] == "torch"


@lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> frozenset[str]:
    """What code looks up, that of the functions which it defines too, and what it may: strings."""
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    strings = [one for one in code.co_consts if isinstance(one, str) and one.isidentifier()]
    return frozenset(code.co_names).union(strings, *map(_names, inner))
