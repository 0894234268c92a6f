"""Cross-compiles the extension for Apple silicon, against the macOS wheels of torch.

Runs anywhere: the compiler is the PyPI package ziglang, and Apple's frameworks are the simulator's
stand-in headers, which declare nothing that Apple does not. Fails on a warning in our code, on a
selector that those headers lack, and on a symbol that neither torch nor the system defines.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

from build_support import native
from build_support.mac_wheels import WheelUnavailable, unpacked_wheel
from build_support.macho import undefined_symbols
from build_support.torch_tree import TorchTree

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT / "build" / "wheels"
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


def fetch_torch(requirement: str) -> TorchTree:
    """Headers and libraries of the macOS wheel that fits best."""
    parts = ("torch/include/", "torch/lib/", "torch/version.py")
    return TorchTree(unpacked_wheel(requirement, WHEELS, parts) / "torch")


def build_extension(torch: TorchTree, root: Path = ROOT) -> Path:
    """Compiles and links the `_C` of the project at `root` for macOS; raises BuildFailure."""
    build_dir = Path("build", "macos", f"torch-{torch.version}")
    output = build_dir / "_C.so"
    module = native.Module(
        output, COMPILER, native.find(root, "csrc/*.cpp", "csrc/device_metal.mm"),
        [*native.COMMON_FLAGS, *STRICT, "-Icsrc", "-isystem", str(FRAMEWORKS),
         *native.torch_flags(torch, root)],
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
            torch = fetch_torch(one)
            print(f"==> {one}: torch {torch.version} for macOS 14, arm64", flush=True)
            extension = build_extension(torch)
            size = extension.stat().st_size / 2**20
            print(f"    {extension.relative_to(ROOT)}: {size:.1f} MiB, every symbol accounted for, "
                  f"{time.monotonic() - start:.0f} s")
    except (BuildFailure, WheelUnavailable) as failure:
        raise SystemExit(f"error: {failure}") from None


if __name__ == "__main__":
    main()
