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


def package_version(package: str) -> str:
    """The version of the wheel in `wheel_folder(package)`."""
    (info,) = wheel_folder(package).glob("*.dist-info")
    return info.name.removesuffix(".dist-info").rpartition("-")[2]
