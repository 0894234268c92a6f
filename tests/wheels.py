"""macOS wheels that tests read and never install: Apple's API, and the kernels of others."""

import functools
from pathlib import Path

from build_support.mac_wheels import unpacked_wheel

FOLDER = Path(__file__).resolve().parent.parent / "build" / "wheels"


@functools.cache
def wheel_folder(package: str) -> Path:
    """The unpacked contents of a package's newest wheel for Apple silicon.

    Raises WheelUnavailable.
    """
    return unpacked_wheel(package, FOLDER)
