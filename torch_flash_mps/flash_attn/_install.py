"""Opt-in: the name ``flash_attn``, by which model code imports the functions of this package.

A finder at the end of ``sys.meta_path`` answers for three modules and for the package's metadata,
so that a real flash_attn is never hidden.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from torch_flash_mps.flash_attn import _transformers

__all__ = ["install", "uninstall"]

#: The release of flash_attn whose signatures these are.
VERSION = "2.8.3"
_OURS = "torch_flash_mps.flash_attn"
#: What is imported as what.
_SOURCES = {
    "flash_attn": _OURS,
    "flash_attn.flash_attn_interface": _OURS,
    "flash_attn.bert_padding": f"{_OURS}.bert_padding",
}


def _not_here(*arguments: Any, **options: Any) -> NoReturn:
    """diffusers imports these names with flash_attn_func, and calls them on several GPUs only."""
    raise NotImplementedError(
        "flash_attn_interface: expected a call of the public functions, got one of "
        "_wrapped_flash_attn_forward or _wrapped_flash_attn_backward, which exist for CUDA only"
    )


class _Distribution(importlib.metadata.Distribution):
    """flash_attn as pip would have recorded it."""

    def read_text(self, filename: str) -> str | None:
        return {
            "METADATA": f"Metadata-Version: 2.1\nName: flash_attn\nVersion: {VERSION}\n",
            "top_level.txt": "flash_attn\n",
        }.get(filename)

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path


class _Finder(importlib.metadata.DistributionFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _SOURCES:
            return None
        source = importlib.import_module(_SOURCES[fullname])
        return importlib.machinery.ModuleSpec(
            fullname, self, origin=source.__file__, is_package=fullname == "flash_attn")

    def exec_module(self, module: ModuleType) -> None:
        source = importlib.import_module(_SOURCES[module.__name__])
        public = {name: getattr(source, name) for name in source.__all__ if name not in __all__}
        vars(module).update(public, __doc__=source.__doc__, __file__=source.__file__)
        if module.__name__ == "flash_attn":
            vars(module).update(__version__=VERSION)
            importlib.import_module("flash_attn.flash_attn_interface")   # an attribute of it
        elif module.__name__ == "flash_attn.flash_attn_interface":
            vars(module).update(_wrapped_flash_attn_forward=_not_here,
                                _wrapped_flash_attn_backward=_not_here)

    def find_distributions(
        self, context: Any = importlib.metadata.DistributionFinder.Context()  # noqa: B008
    ) -> Iterable[importlib.metadata.Distribution]:
        if context.name is None or re.sub(r"[-_.]+", "-", context.name).lower() == "flash-attn":
            yield _Distribution()


_finder = _Finder()


def install() -> None:
    """Makes ``import flash_attn`` find `torch_flash_mps.flash_attn`, in this process.

    Afterwards model code that imports ``flash_attn``, ``flash_attn.flash_attn_interface`` or
    ``flash_attn.bert_padding`` runs, ``importlib.metadata.version("flash_attn")`` answers, and with
    transformers `is_flash_attn_2_available()` is true and ``attn_implementation=
    "flash_attention_2"`` works on mps. Transformers, if installed, is imported for that.

    Other parts of flash_attn (its layers, its rotary kernels, ...) stay missing: importing them
    raises `ModuleNotFoundError`, as without it. May be called repeatedly.

    Raises:
        RuntimeError: another flash_attn is installed, which would be hidden; or transformers is of
            a release whose checks are not known.

    Example:
        >>> import torch_flash_mps
        >>> torch_flash_mps.flash_attn.install()
        >>> from flash_attn import flash_attn_func
        >>> flash_attn_func is torch_flash_mps.flash_attn.flash_attn_func
        True
        >>> torch_flash_mps.flash_attn.uninstall()
    """
    if _finder in sys.meta_path:
        return
    if (place := _another()) is not None:
        raise RuntimeError(
            f"flash_attn.install: expected no package flash_attn, found one in {place}; uninstall "
            "it, or use it without flash_attn.install()"
        )
    sys.meta_path.append(_finder)
    try:
        _transformers.open_gate()
    except RuntimeError:
        uninstall()
        raise


def uninstall() -> None:
    """Takes :func:`install` back. What was imported meanwhile goes on working where it is held."""
    if _finder not in sys.meta_path:
        return
    sys.meta_path.remove(_finder)
    for name in _SOURCES:
        sys.modules.pop(name, None)
    _transformers.close_gate()


def _another() -> str | None:
    """Where a flash_attn that is not ours would come from."""
    if "flash_attn" in sys.modules:
        module = sys.modules["flash_attn"]
        return str(getattr(module, "__file__", None) or module)
    spec = importlib.util.find_spec("flash_attn")
    return None if spec is None else str(spec.origin or spec.submodule_search_locations)
