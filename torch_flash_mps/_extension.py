"""Loads the compiled modules, or remembers why they cannot be loaded."""

from __future__ import annotations

import importlib
import platform
import sys
from types import ModuleType

import torch

REBUILD_COMMAND = "pip install --no-build-isolation --force-reinstall --no-deps ."


def _public(version: str) -> str:
    """The version without its local part: 2.13.0+cpu and 2.13.0 are one release."""
    return version.partition("+")[0]


def _check_torch(built_for: str, found: str) -> None:
    if _public(built_for) != _public(found):
        raise ImportError(
            f"torch_flash_mps was built for torch {built_for}, found torch {found}; rebuild it "
            f"with `{REBUILD_COMMAND}`"
        )


def _is_command_line() -> bool:
    """Whether ``python -m torch_flash_mps`` imports the package: argv[0] is "-m" until it runs."""
    modules = [argument.removeprefix("-m") for argument in sys.orig_argv]
    return sys.argv[:1] == ["-m"] and "torch_flash_mps" in modules


def _load() -> tuple[ModuleType | None, str | None]:
    try:
        build_info = importlib.import_module("torch_flash_mps._build_info")
    except ModuleNotFoundError:
        return None, f"the native module was not built; build it with `{REBUILD_COMMAND}`"
    _check_torch(build_info.TORCH_VERSION, torch.__version__)
    extension = importlib.import_module("torch_flash_mps._C")
    importlib.import_module("torch_flash_mps._ops")
    importlib.import_module("torch_flash_mps._vmap")
    return extension, None


def _load_or_report() -> tuple[ModuleType | None, str | None]:
    """An import fails where the native module does not fit; the command line lives to say why."""
    try:
        return _load()
    except ImportError as error:
        if not _is_command_line():
            raise
        return None, str(error)


C, _load_error = _load_or_report()


def unavailable_reason() -> str | None:
    """Why the Metal kernels cannot run here; None when they can."""
    if C is None:
        return _load_error
    if not torch.backends.mps.is_available():
        if platform.system() == "Darwin":
            return "torch has no MPS device on this Mac (macOS 14 or newer and Apple silicon)"
        return (
            f"{platform.system()} has no Metal device; on Linux "
            "`import torch_flash_mps.simulator` brings a simulated one"
        )
    if not C.device_name():
        return "no Metal device was found"
    return None


def is_available() -> bool:
    """Whether ``mps`` tensors run through the Metal kernels."""
    return unavailable_reason() is None


def extension() -> ModuleType:
    """The module ``_C``.

    Raises:
        RuntimeError: it was not built.
    """
    if C is None:
        raise RuntimeError(f"torch_flash_mps: {_load_error}")
    return C
