"""Compiles and links the native modules with Ninja: one build file, any number of compilers."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

from build_support.torch_tree import TorchTree

TORCH_LIBS = ("torch_python", "torch", "torch_cpu", "c10")
COMMON_FLAGS = ["-std=c++20", "-O2", "-fPIC", "-Wall", "-Wextra"]


@dataclass
class Module:
    """One shared library: `sources` compiled with `compiler` and linked to `output`."""

    output: Path
    compiler: list[str]
    sources: list[Path]
    flags: list[str]
    link_flags: list[str]
    links_with: list[Path] = field(default_factory=list)   # outputs of other modules
    embeds_metal: bool = False


def torch_flags(torch: TorchTree) -> list[str]:
    includes = [*torch.include_dirs, *python_include_dirs()]
    return [flag for folder in includes for flag in ("-isystem", str(folder))]


def torch_link_flags(torch: TorchTree) -> list[str]:
    return [f"-L{torch.lib_dir}", *(f"-l{name}" for name in TORCH_LIBS)]


def python_include_dirs() -> list[str]:
    return list(dict.fromkeys(sysconfig.get_path(name) for name in ("include", "platinclude")))


def metal_files(root: Path) -> list[Path]:
    return sorted((root / "metal").glob("*.metal"))


def build(root: Path, build_dir: Path, modules: list[Module]) -> None:
    """Brings the outputs up to date; raises CalledProcessError when a compiler does."""
    build_dir.mkdir(parents=True, exist_ok=True)
    ninja_file = build_dir / "build.ninja"
    ninja_file.write_text(_ninja_text(root, build_dir, modules))
    ninja = shutil.which("ninja")
    command = [ninja] if ninja else [sys.executable, "-m", "ninja"]
    jobs = f"-j{os.cpu_count() or 1}"
    subprocess.run([*command, jobs, "-f", str(ninja_file)], cwd=root, check=True)


def _ninja_text(root: Path, build_dir: Path, modules: list[Module]) -> str:
    embed = _command([sys.executable, str(root / "build_support" / "embed.py")])
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
        f"  command = {embed} $out $sources",
        "  description = embed metal/",
    ]
    embedded = build_dir / "metal_sources.cpp"
    metal = sorted((root / "metal").glob("*"))
    inputs = [*metal, root / "build_support" / "embed.py"]
    lines += [
        f"build {_path(embedded)}: embed | {' '.join(map(_path, inputs))}",
        f"  sources = {_command(map(str, metal_files(root)))}",
    ]
    for module in modules:
        lines += _module_lines(root, build_dir, module, embedded)
    return "\n".join(lines) + "\n"


def _module_lines(root: Path, build_dir: Path, module: Module, embedded: Path) -> list[str]:
    ccache = shutil.which("ccache")
    # Zig keeps a cache of its own, and ccache does not know its command line.
    launcher = [ccache] if ccache and "ziglang" not in module.compiler else []
    lines, objects = [], []
    for source in [*module.sources, *([embedded] if module.embeds_metal else [])]:
        base = build_dir if source == embedded else root
        target = build_dir / module.output.stem / f"{source.relative_to(base)}.o"
        objects.append(_path(target))
        lines += [
            f"build {objects[-1]}: compile {_path(source)}",
            f"  compiler = {_command([*launcher, *module.compiler])}",
            f"  flags = {_command(module.flags)}",
        ]
    others = [_path(path) for path in module.links_with]
    return [
        *lines,
        f"build {_path(module.output)}: link {' '.join([*objects, *others])}",
        f"  compiler = {_command(module.compiler)}",
        f"  flags = {_command(module.link_flags)}",
    ]


def _command(words) -> str:
    return shlex.join(words).replace("$", "$$")


def _path(path: Path) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")
