"""Builds the native modules; everything else about the package is in pyproject.toml."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from build_support import native, simulator  # noqa: E402
from build_support.torch_tree import TorchTree, find_torch  # noqa: E402

PACKAGE = "torch_flash_mps"
OP, DEVICE = f"{PACKAGE}._C", f"{PACKAGE}._simulator"
SIMULATOR = Path("csrc", "simulator")   # as all paths here, relative to ROOT
BUILD_INFO = '''"""Written by setup.py: what this build of the package was made for."""

TORCH_VERSION = {torch_version!r}
SIMULATOR_MISSING = {missing!r}  # why the simulated device was left out; None when it is there
'''

OP_SOURCES = native.find(ROOT, "csrc/*.cpp")
DEVICE_SOURCES = native.find(ROOT, "csrc/device_metal.mm")
SIMULATOR_SOURCES = native.find(ROOT, "csrc/simulator/**/*.cpp", "csrc/simulator/**/*.mm")


def op_module(torch: TorchTree, output: Path) -> native.Module:
    """`_C`: the op. On macOS it holds the Metal device; elsewhere the simulator brings one."""
    sources, flags, link_flags = OP_SOURCES, [], ["-shared", f"-Wl,-soname,{output.name}"]
    if sys.platform == "darwin":
        sources = [*OP_SOURCES, *DEVICE_SOURCES]
        flags = ["-mmacosx-version-min=14.0"]
        link_flags = ["-bundle", "-undefined", "dynamic_lookup", *flags,
                      "-framework", "Metal", "-framework", "Foundation",
                      "-Wl,-rpath,@loader_path/../torch/lib"]
    return native.Module(
        output, shlex.split(os.environ.get("CXX", "c++")), sources,
        [*native.COMMON_FLAGS, *flags, "-Icsrc", *native.torch_flags(torch, ROOT)],
        [*link_flags, *native.torch_link_flags(torch)], embeds_metal=True,
    )


def simulator_module(torch: TorchTree, output: Path, op: Path, clang: list[str]) -> native.Module:
    """`_simulator`: the same device layer on a stand-in for Apple's API."""
    includes = ["-Icsrc", f"-I{SIMULATOR}", f"-I{SIMULATOR / 'frameworks'}"]
    return native.Module(
        # In link order, for so are Objective-C's classes registered: Metal's before their user.
        output, clang, [*SIMULATOR_SOURCES, *DEVICE_SOURCES],
        [*native.COMMON_FLAGS, *simulator.OBJC_FLAGS, *includes, *native.torch_flags(torch, ROOT)],
        ["-shared", "-pthread", "-ldl", "-Wl,-rpath,$ORIGIN", *simulator.LIBRARIES,
         *native.torch_link_flags(torch)], links_with=[op],
    )


class BuildNative(build_ext):
    """build_ext through Ninja, which knows the two compilers and rebuilds only what changed."""

    def build_extensions(self) -> None:
        try:
            torch = find_torch()
            modules, missing = self.plan(torch)
            native.build(ROOT, modules[OP].output.parent, list(modules.values()))
        except LookupError as hint:
            raise SystemExit(f"error: {hint}") from None
        except subprocess.CalledProcessError:
            raise SystemExit("error: the native build failed; see the messages above") from None
        for name, module in modules.items():
            target = Path(self.get_ext_fullpath(name))
            target.parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(str(ROOT / module.output), str(target))
        self.write_package_files(Path(self.build_lib) / PACKAGE, torch, missing)

    def plan(self, torch: TorchTree) -> tuple[dict[str, native.Module], str | None]:
        """The modules to build by name, and why the simulated device is not among them."""
        build_dir = Path("build") / f"{sys.implementation.cache_tag}-torch-{torch.version}"
        output = {one.name: build_dir / Path(self.get_ext_filename(one.name)).name
                  for one in self.extensions}
        modules = {OP: op_module(torch, output[OP])}
        if DEVICE not in output:
            return modules, "it is for Linux"
        try:
            clang = simulator.find_compiler()
        except simulator.MissingRequirement as reason:
            print(f"The simulated Metal device is left out: {reason}", file=sys.stderr)
            self.extensions = [one for one in self.extensions if one.name != DEVICE]
            for folder in (Path(self.build_lib), ROOT):   # of an earlier build
                (folder / self.get_ext_filename(DEVICE)).unlink(missing_ok=True)
            return modules, str(reason)
        modules[DEVICE] = simulator_module(torch, output[DEVICE], output[OP], clang)
        return modules, None

    def write_package_files(self, folder: Path, torch: TorchTree, missing: str | None) -> None:
        text = BUILD_INFO.format(torch_version=torch.version, missing=missing)
        (folder / "_build_info.py").write_text(text)
        headers = folder / "_simulator_headers"   # read at run time to compile kernels
        shutil.rmtree(headers, ignore_errors=True)
        if missing is None:
            shutil.copytree(ROOT / SIMULATOR / "msl", headers / "msl")
            (headers / "runtime").mkdir()
            shutil.copy(ROOT / SIMULATOR / "runtime" / "kernel_abi.h", headers / "runtime")

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        self.copy_file(str(Path(self.build_lib) / PACKAGE / "_build_info.py"),
                       str(ROOT / PACKAGE / "_build_info.py"))


def extension(name: str, *sources: Path) -> Extension:
    return Extension(name, [path.as_posix() for path in sources])


extensions = [extension(OP, *OP_SOURCES)]
if sys.platform == "linux":
    extensions.append(extension(DEVICE, *DEVICE_SOURCES, *SIMULATOR_SOURCES))

setup(ext_modules=extensions, cmdclass={"build_ext": BuildNative})
