"""Reports what is here: versions, device, and what would run; exit status 1 when nothing can."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import platform
from collections.abc import Iterator
from typing import Any

import torch

import torch_flash_mps
from torch_flash_mps import _extension, sdpa
from torch_flash_mps.cli import machine

LIBRARIES = ("numpy", "transformers", "diffusers", "matplotlib")
#: What it is, heads of query and of key and value, seqlen_q, seqlen_k, head_dim, dtype, options.
SAMPLES: list[tuple[str, int, int, int, int, int, torch.dtype, dict[str, Any]]] = [
    ("a prompt", 32, 8, 512, 512, 128, torch.float16, {"is_causal": True}),
    ("one token, 4096 cached", 32, 8, 1, 4096, 128, torch.float16, {}),
    ("an encoder", 12, 12, 128, 128, 64, torch.float32, {}),
    ("a window of 256", 4, 1, 512, 512, 256, torch.bfloat16,
     {"is_causal": True, "window_left": 255}),
    ("head_dim 512", 1, 1, 512, 512, 512, torch.float16, {}),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It takes none."""


def run(options: argparse.Namespace) -> int:
    """Prints the report. Returns the exit status: 1 when no kernel can run here."""
    reason = machine.find_device()
    print(f"torch_flash_mps {torch_flash_mps.__version__}")
    for name, value in [*versions(), *(device() if reason is None else [])]:
        print(f"  {name:15} {value}")
    if reason is not None:
        print(f"The kernels cannot run here: {reason}")
        return 1
    print("What would run:")
    for name, answer in samples():
        print(f"  {name:23} {answer}")
    print("The kernels can run here"
          + (", simulated: results are right, speed is not." if machine.is_simulated() else "."))
    return 0


def versions() -> Iterator[tuple[str, str]]:
    yield "system", f"{machine.system()}, Python {platform.python_version()}"
    yield "torch", f"{torch.__version__}, {_built_for()}"
    yield "native module", ("loaded" if _extension.C is not None
                            else f"not loaded: {_extension.unavailable_reason()}")
    yield "libraries", ", ".join(f"{name} {_version(name)}" for name in LIBRARIES)


def _built_for() -> str:
    try:
        build_info = importlib.import_module("torch_flash_mps._build_info")
    except ModuleNotFoundError:
        return "the native module was not built"
    return f"this build is for {build_info.TORCH_VERSION}"


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def device() -> Iterator[tuple[str, str]]:
    native = _extension.extension()
    kind = f"simulated on {machine.cpu_model()}" if machine.is_simulated() else "a real GPU"
    yield "device", f"{native.device_name()}, {kind}"
    row = torch_flash_mps.explain(*[torch.ones(1, 1, 1, 8, device="mps")] * 3)["family"]
    family = native.gpu_family()
    yield "GPU family", f"{f'apple{family}' if family else 'not known'}, tiles of {row}"
    yield "GPU cores", str(native.gpu_cores() or "not known")
    yield "Metal language", native.metal_language
    holders = sdpa.holders()
    yield "sdpa", ("to the Metal kernels, by " + ", ".join(holders) if holders
                   else "PyTorch's own; torch_flash_mps.enable_sdpa() changes that")


def samples() -> Iterator[tuple[str, str]]:
    """What each of `SAMPLES` would run, or why it would not."""
    for name, heads, kv_heads, seqlen_q, seqlen_k, head_dim, dtype, options in SAMPLES:
        q = torch.empty(1, heads, seqlen_q, head_dim, dtype=dtype, device="mps")
        k = torch.empty(1, kv_heads, seqlen_k, head_dim, dtype=dtype, device="mps")
        plan = torch_flash_mps.explain(q, k, k, enable_gqa=heads != kv_heads, **options)
        yield name, plan["kernel"] or f"not supported: {plan['reason']}"
