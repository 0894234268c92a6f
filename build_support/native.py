"""Compiles and links the native modules with Ninja: one build file, any number of compilers."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from build_support.torch_tree import TorchTree

TORCH_LIBS = ("torch_python", "torch", "torch_cpu", "c10")
# A designated initialiser that names some fields leaves the others at their defaults on purpose.
COMMON_FLAGS = ["-std=c++20", "-O2", "-fPIC", "-Wall", "-Wextra", "-Wno-missing-field-initializers"]


@dataclass
class Module:
    """One shared library: `sources` compiled with `compiler` and linked to `output`.

    Paths are relative to the project's root, where Ninja runs: so ccache recognises another clone.
    """

    output: Path
    compiler: list[str]
    sources: list[Path]
    flags: list[str]
    link_flags: list[str]
    links_with: list[Path] = field(default_factory=list)   # outputs of other modules
    embeds_metal: bool = False


def torch_flags(torch: TorchTree, root: Path) -> list[str]:
    folders = [*torch.include_dirs, *python_include_dirs()]
    inside = [one.relative_to(root) if one.is_relative_to(root) else one for one in folders]
    return [flag for folder in inside for flag in ("-isystem", str(folder))]


def torch_link_flags(torch: TorchTree) -> list[str]:
    return [f"-L{torch.lib_dir}", *(f"-l{name}" for name in TORCH_LIBS)]


def python_include_dirs() -> list[Path]:
    paths = (sysconfig.get_path(name) for name in ("include", "platinclude"))
    return [Path(path) for path in dict.fromkeys(paths)]


def find(root: Path, *patterns: str) -> list[Path]:
    """The files of `root` that match, relative to it."""
    return sorted(path.relative_to(root) for pattern in patterns for path in root.glob(pattern))


def build(root: Path, build_dir: Path, modules: list[Module]) -> None:
    """Brings the outputs up to date; raises CalledProcessError when a compiler refuses."""
    ninja_file = root / build_dir / "build.ninja"
    ninja_file.parent.mkdir(parents=True, exist_ok=True)
    ninja = shutil.which("ninja")
    command = [ninja] if ninja else [sys.executable, "-m", "ninja"]
    jobs = f"-j{os.cpu_count() or 1}"
    with ninja_file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)   # Ninja does not expect another one in its folder
        ninja_file.write_text(_ninja_text(root, build_dir, modules))
        subprocess.run([*command, jobs, "-f", str(ninja_file)], cwd=root, check=True)


def _ninja_text(root: Path, build_dir: Path, modules: list[Module]) -> str:
    embed = Path(__file__).with_name("embed.py")
    embedded = build_dir / "metal_sources.cpp"
    inputs = [*find(root, "metal/*.h", "metal/*.metal"), embed]
    lines = [
        "ninja_required_version = 1.8",
        f"builddir = {_path(build_dir)}",
        "rule compile",
        "  command = $compiler $flags -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $in",
        "rule link",
        "  command = $compiler $in $flags -o $out",
        "  description = link $out",
        "rule embed",
        f"  command = {_command([sys.executable, str(embed)])} $out $sources",
        "  description = embed metal/",
        f"build {_path(embedded)}: embed | {' '.join(map(_path, inputs))}",
        f"  sources = {_command(map(str, find(root, 'metal/*.metal')))}",
    ]
    for module in modules:
        extra = [embedded] if module.embeds_metal else []
        lines += _module_lines(module, [*module.sources, *extra], build_dir)
    return "\n".join(lines) + "\n"


def _module_lines(module: Module, sources: list[Path], build_dir: Path) -> list[str]:
    ccache = shutil.which("ccache")
    # Zig keeps a cache of its own, and ccache does not know its command line.
    launcher = [ccache] if ccache and "ziglang" not in module.compiler else []
    folder = build_dir / "objects" / module.output.name.partition(".")[0]
    objects = [folder / f"{source}.o" for source in sources]
    lines = []
    for source, target in zip(sources, objects, strict=True):
        lines += [
            f"build {_path(target)}: compile {_path(source)}",
            f"  compiler = {_command([*launcher, *module.compiler])}",
            f"  flags = {_command(module.flags)}",
        ]
    inputs = " ".join(map(_path, [*objects, *module.links_with]))
    return [
        *lines,
        f"build {_path(module.output)}: link {inputs}",
        f"  compiler = {_command(module.compiler)}",
        f"  flags = {_command(module.link_flags)}",
    ]


def _command(words: Iterable[str]) -> str:
    return shlex.join(words).replace("$", "$$")


def _path(path: Path) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")
