"""Cross-compiles the extension for Apple silicon, against the macOS wheels of torch.

Runs anywhere: the compiler is the PyPI package ziglang, and Apple's frameworks are the simulator's
stand-in headers, which declare nothing that Apple does not. Fails on a warning in our code, on a
selector that those headers lack, and on a symbol that neither torch nor the system defines.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from build_support import native
from build_support.macho import undefined_symbols
from build_support.torch_tree import TorchTree

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "macos"
FRAMEWORKS = ROOT / "csrc" / "simulator" / "frameworks"
COMPILER = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-macos.14.0"]
STRICT = ["-Werror", "-Werror=objc-method-access", "-Wundeclared-selector"]
# What is looked up when macOS loads the extension: the interpreter, the Objective-C runtime, and
# the frameworks, for which there is no library to link with here.
LOADED_BY_MACOS = re.compile(
    r"__?Py|_objc_|_OBJC_(CLASS|METACLASS|EHTYPE)_\$_(NS|MTL|MPS)|___CFConstantStringClassReference$"
    r"|_MTL|_NS[A-Z]|__objc_empty_|__NSConcrete\w+Block$|__Block_|_dispatch_|__dispatch_"
)


class BuildFailure(Exception):
    """The extension does not build for macOS."""


def supported_range() -> str:
    match = re.search(r'^ +"(torch\b[^"]+)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    if not match:
        raise ValueError("pyproject.toml: expected a line with the range of torch, got none")
    return match[1]


def oldest_version(requirement: str) -> str:
    match = re.search(r">=([\d.]+)", requirement)
    if not match:
        raise ValueError(f"pyproject.toml: expected a lower bound of torch, got {requirement!r}")
    return match[1] + ".0" * (2 - match[1].count("."))


def fetch_wheel(requirement: str) -> Path:
    """Downloads the macOS wheel of torch that fits best, unless it lies in build/ already."""
    folder = BUILD / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps",
               "--platform=macosx_14_0_arm64", f"--python-version={python}",
               "--implementation=cp", "--only-binary=:all:", "-d", str(folder), requirement]
    # A constraints file of this system speaks of its own torch, not of a Mac's.
    done = subprocess.run(command, env={**os.environ, "PIP_CONSTRAINT": os.devnull},
                          capture_output=True, text=True)
    match = re.search(r"torch-[\w.+]+-cp\d+-cp\d+-macosx\w+\.whl", done.stdout)
    if done.returncode or not match:
        raise BuildFailure(f"no macOS wheel for {requirement!r}:\n{done.stdout}{done.stderr}")
    return folder / match[0]


def unpack(wheel: Path) -> TorchTree:
    """Headers and libraries of the wheel."""
    root = BUILD / "wheels" / wheel.stem / "torch"
    complete = root.parent / "complete"
    if not complete.exists():
        with zipfile.ZipFile(wheel) as archive:
            wanted = ("torch/include/", "torch/lib/", "torch/version.py")
            archive.extractall(root.parent,
                               [name for name in archive.namelist() if name.startswith(wanted)])
        complete.touch()
    return TorchTree(root)


def build_extension(torch: TorchTree, root: Path = ROOT) -> Path:
    """Compiles and links the `_C` of the project at `root` for macOS; raises BuildFailure."""
    build_dir = Path("build", "macos", f"torch-{torch.version}")
    output = build_dir / "_C.so"
    module = native.Module(
        output, COMPILER, native.find(root, "csrc/*.cpp", "csrc/device_metal.mm"),
        [*native.COMMON_FLAGS, *STRICT, "-Icsrc", "-isystem", str(FRAMEWORKS),
         *native.torch_flags(torch)],
        ["-shared", "-Wl,-undefined,dynamic_lookup", *native.torch_link_flags(torch)],
        embeds_metal=True,
    )
    try:
        native.build(root, build_dir, [module])
    except subprocess.CalledProcessError:
        raise BuildFailure("the compiler or the linker refused; see the messages above") from None
    check_symbols(root / output, torch)
    return root / output


def check_symbols(extension: Path, torch: TorchTree) -> None:
    """Every undefined symbol has a library, or is one that macOS or Python brings."""
    undefined = undefined_symbols(extension)
    nowhere = [one.symbol for one in undefined
               if one.library is None and not LOADED_BY_MACOS.match(one.symbol)]
    if nowhere:
        raise BuildFailure(f"{extension.name}: no library of torch {torch.version} or of macOS "
                           f"defines {', '.join(sorted(nowhere))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("torch", nargs="*", help="requirements, such as torch==2.14.0; without "
                        "any, the oldest supported torch and the newest")
    requirement = supported_range()
    wanted = parser.parse_args().torch or [f"torch=={oldest_version(requirement)}", requirement]
    try:
        for one in wanted:
            start = time.monotonic()
            torch = unpack(fetch_wheel(one))
            print(f"==> {one}: torch {torch.version} for macOS 14, arm64", flush=True)
            extension = build_extension(torch)
            size = extension.stat().st_size / 2**20
            print(f"    {extension.relative_to(ROOT)}: {size:.1f} MiB, every symbol accounted for, "
                  f"{time.monotonic() - start:.0f} s")
    except BuildFailure as failure:
        raise SystemExit(f"error: {failure}") from None


if __name__ == "__main__":
    main()
