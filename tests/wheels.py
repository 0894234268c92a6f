"""macOS wheels that tests read and never install: Apple's API, and the kernels of others."""

import functools
import os
import subprocess
import sys
import zipfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "build" / "wheels"


class WheelUnavailable(Exception):
    """The package index did not give the wheel."""


@functools.cache
def wheel_folder(package: str) -> Path:
    """The unpacked contents of a package's newest wheel for Apple silicon.

    Downloaded once, into build/. Raises WheelUnavailable.
    """
    target = FOLDER / package
    complete = target / ".complete"
    if not complete.exists():
        target.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(_download(package, target)) as archive:
            archive.extractall(target)
        complete.touch()
    return target


def _download(package: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps",
               "--platform=macosx_14_0_arm64", "--only-binary=:all:", "-d", str(folder), package]
    # A constraints file of this system does not speak of a Mac's packages.
    done = subprocess.run(command, env={**os.environ, "PIP_CONSTRAINT": os.devnull},
                          capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise WheelUnavailable(f"{package}: no wheel for Apple silicon:\n{done.stdout}{done.stderr}")
    return wheels[-1]
