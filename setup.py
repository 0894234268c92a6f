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
SIMULATOR = ROOT / "csrc" / "simulator"
BUILD_INFO = '''"""Written by setup.py: what this build of the package was made for."""

TORCH_VERSION = {torch_version!r}
SIMULATOR_MISSING = {missing!r}  # why the simulated device was left out; None when it is there
'''


def op_sources() -> list[Path]:
    return sorted((ROOT / "csrc").glob("*.cpp"))


def simulator_sources() -> list[Path]:
    tree = (path for path in SIMULATOR.rglob("*") if path.suffix in (".cpp", ".mm"))
    return [ROOT / "csrc" / "device_metal.mm", *sorted(tree)]


def op_module(torch: TorchTree, output: Path) -> native.Module:
    """`_C`: the op. On macOS it holds the Metal device; elsewhere the simulator brings one."""
    sources, flags, link_flags = op_sources(), [], ["-shared", f"-Wl,-soname,{output.name}"]
    if sys.platform == "darwin":
        sources = [*sources, ROOT / "csrc" / "device_metal.mm"]
        flags = ["-mmacosx-version-min=14.0"]
        link_flags = ["-bundle", "-undefined", "dynamic_lookup", *flags,
                      "-framework", "Metal", "-framework", "Foundation",
                      "-Wl,-rpath,@loader_path/../torch/lib"]
    return native.Module(
        output, shlex.split(os.environ.get("CXX", "c++")), sources,
        [*native.COMMON_FLAGS, *flags, f"-I{ROOT / 'csrc'}", *native.torch_flags(torch)],
        [*link_flags, *native.torch_link_flags(torch)], embeds_metal=True,
    )


def simulator_module(torch: TorchTree, output: Path, op: Path, clang: list[str]) -> native.Module:
    """`_simulator`: the same device layer on a stand-in for Apple's API."""
    includes = [f"-I{folder}" for folder in (ROOT / "csrc", SIMULATOR, SIMULATOR / "frameworks")]
    return native.Module(
        output, clang, simulator_sources(),
        [*native.COMMON_FLAGS, *simulator.OBJC_FLAGS, *includes, *native.torch_flags(torch)],
        ["-shared", "-pthread", "-ldl", "-Wl,-rpath,$ORIGIN", *simulator.LIBRARIES,
         *native.torch_link_flags(torch)], links_with=[op],
    )


class BuildNative(build_ext):
    """build_ext through Ninja, which knows the two compilers and rebuilds only what changed."""

    def build_extensions(self) -> None:
        try:
            torch = find_torch()
        except LookupError as hint:
            raise SystemExit(f"error: {hint}") from None
        build_dir = ROOT / "build" / f"{sys.implementation.cache_tag}-torch-{torch.version}"
        output = {one.name: build_dir / Path(self.get_ext_filename(one.name)).name
                  for one in self.extensions}
        op = output[f"{PACKAGE}._C"]
        modules, missing = [op_module(torch, op)], "it is for Linux; a Mac has the real one"
        if f"{PACKAGE}._simulator" in output:
            try:
                clang, missing = simulator.find_compiler(), None
                name = output[f"{PACKAGE}._simulator"]
                modules.append(simulator_module(torch, name, op, clang))
            except simulator.MissingRequirement as reason:
                missing = str(reason)
                print(f"The simulated Metal device is left out: {missing}", file=sys.stderr)
                self.leave_out(f"{PACKAGE}._simulator")
        try:
            native.build(ROOT, build_dir, modules)
        except subprocess.CalledProcessError:
            raise SystemExit("error: the native build failed; see the messages above") from None
        for one in self.extensions:
            target = Path(self.get_ext_fullpath(one.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(str(output[one.name]), str(target))
        self.write_package_files(Path(self.build_lib) / PACKAGE, torch, missing)

    def leave_out(self, name: str) -> None:
        self.extensions = [one for one in self.extensions if one.name != name]
        stale = [Path(self.build_lib), ROOT]
        for folder in stale:
            (folder / self.get_ext_filename(name)).unlink(missing_ok=True)

    def write_package_files(self, folder: Path, torch: TorchTree, missing: str | None) -> None:
        text = BUILD_INFO.format(torch_version=torch.version, missing=missing)
        (folder / "_build_info.py").write_text(text)
        headers = folder / "_simulator_headers"   # read at run time to compile kernels
        shutil.rmtree(headers, ignore_errors=True)
        if missing is None:
            shutil.copytree(SIMULATOR / "msl", headers / "msl")
            (headers / "runtime").mkdir()
            shutil.copy(SIMULATOR / "runtime" / "kernel_abi.h", headers / "runtime")

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        self.copy_file(str(Path(self.build_lib) / PACKAGE / "_build_info.py"),
                       str(ROOT / PACKAGE / "_build_info.py"))


def relative(paths: list[Path]) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in paths]


extensions = [Extension(f"{PACKAGE}._C", relative(op_sources()))]
if sys.platform == "linux":
    extensions.append(Extension(f"{PACKAGE}._simulator", relative(simulator_sources())))

setup(ext_modules=extensions, cmdclass={"build_ext": BuildNative})
