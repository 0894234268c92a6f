"""What this machine is: its device, its versions, and why no kernel can run on it."""

from __future__ import annotations

import importlib
import os
import platform
import re
import sys
from pathlib import Path

import torch

from torch_flash_mps import _extension

SIMULATED = "Simulated device: these times say nothing about a GPU"


def find_device() -> str | None:
    """Why no kernel can run here; None when one can. On Linux it brings the simulated device."""
    if _extension.C is not None and not torch.backends.mps.is_built():
        try:
            importlib.import_module("torch_flash_mps.simulator")
        except ImportError as error:
            return str(error)
    return _extension.unavailable_reason()


def is_simulated() -> bool:
    """Whether the `mps` device is the simulated one."""
    return "torch_flash_mps.simulator" in sys.modules


def device_name() -> str:
    return _extension.extension().device_name()


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.processor()


def system() -> str:
    release = platform.mac_ver()[0]
    return f"{f'macOS {release}' if release else platform.system()} {platform.machine()}"


def about() -> str:
    """One line about device, system and torch, for the head of a report."""
    device = f"{device_name()} (simulated on {cpu_model()})" if is_simulated() else device_name()
    return f"{device}, {os.cpu_count()} CPU cores, {system()}, torch {torch.__version__}"


def synchronize(device: str = "mps") -> None:
    if device == "mps":
        torch.mps.synchronize()
