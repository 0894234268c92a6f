"""Opt-in: `F.scaled_dot_product_attention` on mps tensors by our op.

The switch is in PyTorch's dispatcher, so callers in C++, `nn.MultiheadAttention`, autograd and
functions that were imported earlier follow. It holds for the whole process. Inputs that the op does
not take (head_dim above 576, ...) and other devices go to PyTorch's own attention, as
before.

Jagged nested tensors go to `torch.ops.flash_mps.attention_varlen` (see `nested`).

What `torch.compile` compiled keeps the attention that it was compiled with.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

from torch_flash_mps import nested
from torch_flash_mps._extension import extension, unavailable_reason

#: The name in `torch.nn.attention.list_flash_attention_impls()`.
IMPL_NAME = "FLASH_MPS"

_SWITCH, _BLOCK, _REGISTRY = "enable_sdpa()", "sdpa_enabled()", IMPL_NAME

_lock = threading.RLock()
_held: Counter[str] = Counter()   # who wants it on


def _acquire(holder: str) -> None:
    reason = unavailable_reason()
    if reason is not None:
        raise RuntimeError(f"{holder}: expected a Metal device, found none: {reason}")
    with _lock:
        if not _held.total():
            extension().enable_sdpa()
            nested.enable()
        _held[holder] += 1


def _release(holder: str) -> None:
    with _lock:
        _held[holder] -= 1
        if not _held.total():
            nested.disable()
            extension().disable_sdpa()


def enable_sdpa() -> None:
    """Sends `F.scaled_dot_product_attention` on mps tensors to `torch.ops.flash_mps.attention`.

    May be called repeatedly; one :func:`disable_sdpa` takes it back.

    Raises:
        RuntimeError: there is no Metal device; says why.

    Example::

        torch_flash_mps.enable_sdpa()
        layer = torch.nn.MultiheadAttention(64, 4, device="mps")   # need_weights=False uses sdpa
    """
    with _lock:
        if not _held[_SWITCH]:
            _acquire(_SWITCH)


def disable_sdpa() -> None:
    """Undoes :func:`enable_sdpa`: the kernels that were there before are back.

    Blocks of :func:`sdpa_enabled` that are open, in any thread, keep it on until they end. Does
    nothing where it is off.

    Raises:
        RuntimeError: something else than :func:`enable_sdpa` holds it on; says what.
    """
    with _lock:
        if _held[_SWITCH]:
            _release(_SWITCH)
        elif _held.total():
            others = ", ".join(f"{count} x {name}" for name, count in _held.items() if count)
            raise RuntimeError(
                f"disable_sdpa: expected enable_sdpa() before it, found sdpa enabled by {others}; "
                "sdpa_enabled() ends with its block, "
                f"{IMPL_NAME} with torch.nn.attention.restore_flash_attention_impl()"
            )


def holders() -> list[str]:
    """Who has it on at the moment; empty where PyTorch's own attention is in force."""
    with _lock:
        return [name for name, count in _held.items() if count]


@contextlib.contextmanager
def sdpa_enabled() -> Iterator[None]:
    """:func:`enable_sdpa` for the length of a ``with`` block. Blocks may be nested, and overlap in
    other threads; the last one to end takes it back.

    Example::

        with torch_flash_mps.sdpa_enabled():
            out = F.scaled_dot_product_attention(q, k, v)
    """
    _acquire(_BLOCK)
    try:
        yield
    finally:
        _release(_BLOCK)


class _Activated:
    """What PyTorch's registry keeps while our implementation is the active one."""

    def __init__(self) -> None:
        _acquire(_REGISTRY)
        self._is_active = True

    def remove(self) -> None:
        with _lock:
            if self._is_active:
                self._is_active = False
                _release(_REGISTRY)


def register_implementation() -> None:
    """Lists "FLASH_MPS" in PyTorch's registry of flash attention, where the installed torch has it.

    Nothing changes until `torch.nn.attention.activate_flash_attention_impl("FLASH_MPS")`.
    """
    from torch.nn import attention

    register = getattr(attention, "register_flash_attention_impl", None)
    if register is not None:
        register(IMPL_NAME, register_fn=_Activated)
