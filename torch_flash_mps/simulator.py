"""A simulated Metal device for Linux: import this module, and torch has an ``mps`` device.

Kernels and host code of this package, and Metal code of others, run on the CPU as they would on an
Apple GPU, and are checked while they do. Everything else that happens to an ``mps`` tensor runs as
PyTorch's CPU operator on the same memory.

    >>> import torch, torch_flash_mps.simulator
    >>> torch.ones(2, device="mps") + 1
    tensor([2., 2.], device='mps:0')

A fault of a kernel (a read outside its buffer, a race, ...) is a ``RuntimeError`` at the next
operation that needs the kernel's result, or in ``torch.mps.synchronize()``.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from torch_flash_mps import _extension

__all__ = ["Library", "checks", "checks_enabled", "counters", "reset_counters", "set_gpu_cores",
           "set_gpu_family", "shuffle", "stats"]

SYSTEM_PACKAGES = "clang-19 lld-19 libobjc-12-dev libblocksruntime-dev libboost-context-dev"


def _load() -> ModuleType:
    if sys.platform == "darwin" or torch.backends.mps.is_built():
        raise ImportError(
            "torch_flash_mps.simulator: this torch has the real mps device; nothing to simulate"
        )
    _extension.extension()   # the op, which the simulated device serves
    build_info = importlib.import_module("torch_flash_mps._build_info")
    if build_info.SIMULATOR_MISSING:
        raise ImportError(
            "torch_flash_mps.simulator: the simulated device was not built, because "
            f"{build_info.SIMULATOR_MISSING}. Install the system packages {SYSTEM_PACKAGES} "
            f"(Debian and Ubuntu names) and rebuild with `{_extension.REBUILD_COMMAND}`"
        )
    return importlib.import_module("torch_flash_mps._simulator")


def _header_directory() -> Path:
    """Where metal_stdlib and kernel_abi.h are: in the package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    folders = [package / "_simulator_headers", package.parent / "csrc" / "simulator"]
    for folder in folders:
        if (folder / "msl" / "metal_stdlib").exists():
            return folder
    raise ImportError(
        "torch_flash_mps.simulator: expected the headers that kernels are compiled with in "
        f"{' or '.join(map(str, folders))}, found neither"
    )


def _new_untyped_storage(cls: type[torch.UntypedStorage], *args: Any, device: Any = None,
                         **kwargs: Any) -> Any:
    """`torch.UntypedStorage(...)`, which refuses the device type mps in a torch without MPS."""
    if device is None or torch.device(device).type != "mps":
        return torch._C.StorageBase.__new__(cls, *args, device=device, **kwargs)  # type: ignore
    content = args[0] if args else 0
    if isinstance(content, int):
        return torch.empty(content, dtype=torch.uint8, device=device).untyped_storage()
    return torch.tensor(content, dtype=torch.uint8, device=device).untyped_storage()


def _complete_torch(module: ModuleType) -> None:
    """What torch's Python side has only in a build with MPS."""
    torch._C._has_mps = True
    for name in ("_mps_get_name", "_mps_get_core_count", "_mps_host_alias_storage"):
        setattr(torch._C, name, getattr(module, name))
    for answer in (torch.backends.mps.is_available, torch.backends.mps.is_macos_or_newer,
                   torch.backends.mps.is_macos13_or_newer):
        answer.cache_clear()
    torch.UntypedStorage.__new__ = _new_untyped_storage  # type: ignore


def _wait_for_autograd() -> None:
    """Returns when autograd's thread for the device has let go of what its backward passes held.

    It does so after backward() has returned, and may ask for the GIL. CPython before 3.14 ends a
    thread that asks while the interpreter shuts down, and glibc then ends the whole process: it
    unwinds the thread's stack, which torch does not expect. A thread that answers once more, with
    nothing of Python's in its hands, is done with all before.
    """
    leaf = torch.zeros((), device="mps", requires_grad=True)
    with torch.enable_grad():
        torch.autograd.grad(leaf * 1, leaf)
    time.sleep(0.001)


_module = _load()
_module.set_header_directory(str(_header_directory()))
_complete_torch(_module)
atexit.register(_wait_for_autograd)

#: ``Library(msl_source).kernel(name, constants)(*arguments, grid=…, threadgroup=…)`` runs any Metal
#: source on host memory, without torch.
Library = _module.Library


def counters() -> list[dict[str, Any]]:
    """Work of each dispatch since the last reset, in the order in which they ran.

    Returns:
        One dict per dispatch: ``kernel`` (its name) and the counts ``threadgroups``,
        ``matrix_products``, ``exponentials``, ``threadgroup_barriers``, ``simdgroup_barriers``,
        ``shuffles``, ``device_bytes_read``, ``device_bytes_written``,
        ``device_bytes_read_distinct`` (summed over threadgroups), ``device_bytes_footprint``
        (distinct bytes read and distinct bytes written by all threadgroups together, constant
        memory included), ``constant_bytes_read``, ``threadgroup_bytes_read``,
        ``threadgroup_bytes_written``. Byte counts are 0 for kernels that were built with checks
        off.
    """
    torch.mps.synchronize()
    return _module.counters()


def reset_counters() -> None:
    """Forgets the counters of all dispatches so far."""
    torch.mps.synchronize()
    _module.reset_counters()


class checks(contextlib.AbstractContextManager):   # noqa: N801  (called like a function)
    """Switches the checks of kernels on or off, for good or for the length of a ``with`` block.

    With checks on, kernels that are built from then on report every access to memory: bounds,
    races, uninitialised reads, barriers that not all threads reach. They run several times slower.
    """

    def __init__(self, enabled: bool = True) -> None:
        self._before = _module.checks_enabled()
        torch.mps.synchronize()
        _module.set_checks(enabled)

    def __exit__(self, *exc_info: object) -> None:
        try:
            torch.mps.synchronize()
        finally:
            _module.set_checks(self._before)


def shuffle(seed: int | None) -> None:
    """Runs threads and threadgroups in an order that depends on ``seed``; None: ascending."""
    torch.mps.synchronize()
    _module.set_shuffle_seed(seed)


def checks_enabled() -> bool:
    """Whether kernels that are built now are built with checks."""
    return _module.checks_enabled()


def set_gpu_family(name: str) -> None:
    """What the device says it is, ``"apple7"`` to ``"apple10"``: kernels are tuned by family."""
    torch.mps.synchronize()
    _module.set_gpu_family(name)


def set_gpu_cores(count: int | None) -> None:
    """How many cores the GPU has, 8 at first: the splits of a decode depend on it.

    0: the system lists no GPU. None: asking fails, as PyTorch's own question can.
    """
    torch.mps.synchronize()
    _module.set_gpu_cores(count)
    _extension.extension().refresh_device()


def stats() -> dict[str, int]:
    """Totals of the device: ``pipelines_built``, ``command_buffers``, ``commits``, ``dispatches``
    since the process began, and ``bytes_allocated`` now."""
    return _module.stats()
