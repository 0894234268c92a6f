"""What the simulated Metal device needs of the system, and how it is compiled (Linux)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

CLANG_VERSIONS = (21, 20, 19, 18, 17)
# The simulator implements the root class, its plain C++ files get the same flags, and clang finds
# libstdc++'s own use of what it deprecates.
OBJC_FLAGS = ["-fobjc-runtime=gcc", "-fconstant-string-class=NSConstantString", "-fblocks",
              "-fexceptions", "-fobjc-exceptions",
              "-Wno-deprecated-objc-isa-usage", "-Wno-deprecated-declarations",
              "-Wno-unused-command-line-argument"]


@dataclass(frozen=True)
class Requirement:
    """A system library: how to see that it is there, and the Debian package that brings it."""

    package: str
    header: str
    library: str


REQUIREMENTS = (
    Requirement("libobjc-<gcc version>-dev", "objc/runtime.h", "objc"),
    Requirement("libblocksruntime-dev", "Block.h", "BlocksRuntime"),
    Requirement("libboost-context-dev", "boost/context/detail/fcontext.hpp", "boost_context"),
)
LIBRARIES = [f"-l{requirement.library}" for requirement in REQUIREMENTS]


class MissingRequirement(Exception):
    """Says which system packages the simulated device wants."""


def find_compiler() -> list[str]:
    """The command of a clang that can build the simulated device; raises MissingRequirement."""
    clang = _find_clang()
    if not clang:
        raise MissingRequirement(
            f"clang {CLANG_VERSIONS[-1]} or newer is not installed (package clang-19, or another "
            f"of {', '.join(f'clang-{version}' for version in CLANG_VERSIONS)})"
        )
    command = [clang, *_gcc_include_flags()]
    missing = [one.package for one in REQUIREMENTS if not _compiles(command, one)]
    if missing:
        raise MissingRequirement(f"these system packages are not installed: {', '.join(missing)}")
    return command


def _find_clang() -> str | None:
    for name in (*(f"clang++-{version}" for version in CLANG_VERSIONS), "clang++"):
        path = shutil.which(name)
        if path and _major_version(path) >= CLANG_VERSIONS[-1]:
            return path
    return None


def _major_version(clang: str) -> int:
    text = subprocess.run([clang, "--version"], capture_output=True, text=True).stdout
    match = re.search(r"clang version (\d+)", text)
    return int(match[1]) if match else 0


def _gcc_include_flags() -> list[str]:
    """The Objective-C headers lie in GCC's own folder; searched last, for clang has the rest."""
    gcc = shutil.which("gcc")
    if gcc:
        command = [gcc, "-print-file-name=include"]
        folders = [subprocess.run(command, capture_output=True, text=True).stdout.strip()]
    else:
        folders = [str(path.parent) for path in Path("/usr/lib/gcc").glob("*/*/include/objc")]
    return [flag for folder in folders for flag in ("-idirafter", folder)]


def _compiles(command: list[str], requirement: Requirement) -> bool:
    source = f"#include <{requirement.header}>\nint main() {{}}\n"
    flags = ["-x", "c++", "-", f"-l{requirement.library}", "-o", os.devnull]
    return subprocess.run([*command, *flags], input=source, text=True,
                          capture_output=True).returncode == 0
