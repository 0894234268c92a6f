"""What transformers asks before it takes "flash_attention_2", answered for mps.

It looks for the package, which `install` provides, and then for CUDA (MLU, MUSA, NPU, XPU). No
release asks for mps.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch

_CHECK = "is_flash_attn_2_available"


def _yes(kernels_fallback_ok: bool = False) -> bool:
    """In place of `is_flash_attn_2_available` of transformers.utils."""
    return True


# torch.compile takes the answer for a constant, as it does with the function of transformers. Set
# by hand: `torch.compiler.assume_constant_result` imports all of the compiler.
_yes._dynamo_marked_constant = True  # type: ignore[attr-defined]
_is_available = functools.cache(_yes)


# Whether it is open, and then what was there before.
_closed: dict[str, Any] = {}


def open_gate() -> None:
    """Lets transformers, if it is installed, choose flash_attn on mps.

    Raises:
        RuntimeError: its checks are not those that are known here.
    """
    if importlib.util.find_spec("transformers") is None:
        return
    utils = importlib.import_module("transformers.utils.import_utils")
    try:
        row = _row()
        check, devices = getattr(utils, _CHECK), row["supported_devices"]
        _forget(utils)
    except (ImportError, AttributeError, KeyError) as missing:
        version = importlib.import_module("transformers").__version__
        raise RuntimeError(
            "flash_attn.install: expected transformers with the checks of its release 5.24, found "
            f"release {version}, in which one is missing: {missing}"
        ) from missing
    _closed.update(check=check, devices=devices)
    _replace(check, _is_available)
    row["general_availability_check"] = _is_available
    row["supported_devices"] = (*devices, (torch.backends.mps.is_available, "mps"))


def close_gate() -> None:
    """Undoes :func:`open_gate`."""
    if not _closed:
        return
    _replace(_is_available, _closed["check"])
    _row().update(general_availability_check=_closed["check"],
                  supported_devices=_closed["devices"])
    _forget(importlib.import_module("transformers.utils.import_utils"))
    _closed.clear()


def _row() -> dict[str, Any]:
    """What `PreTrainedModel` checks for flash_attention_2."""
    flash = importlib.import_module("transformers.modeling_flash_attention_utils")
    return flash.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]


def _forget(utils: ModuleType) -> None:
    """What was found out about installed packages is out of date."""
    for name in ("_package_distribution_mapping", _CHECK, "is_flash_attn_greater_or_equal"):
        getattr(utils, name).cache_clear()


def _replace(old: Any, new: Any) -> None:
    """In every module that imported the check by name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(_CHECK) is old:
            setattr(module, _CHECK, new)
