"""Who may include or import whom, and how large a file may grow (CONTRIBUTING.md)."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
INCLUDE = re.compile(r'^\s*#\s*(?:include|import)\s*(["<])([^">]+)[">]', re.MULTILINE)
ATEN = re.compile(r"^(ATen|torch|c10)/")
ATEN_USERS = re.compile(r"(ops|autograd\w*|autocast|(attn|score|mask|backward)_args|attention_\w+|"
                        r"fl(ash|ex)_\w+|block_classes|kv_cache\w*|sdpa|bindings)\.(cpp|h)$|device_metal\.mm$")
ATTENTION_HEADERS = {"attn_args.h", "tiling.h", "kernel_key.h", "attn_params.h", "instances.h"}
DEVICE_LAYER = ("device.h", "device.cpp", "device_metal.mm")
BUDGETS = {".metal": 300, ".h": 300, ".cpp": 400, ".mm": 400, ".py": 300, "setup.py": 150}
# A module of the package may import those of a smaller rank and of its own folder only.
RANKS = {"_build_info": 0, "reference": 0, "_ops": 1, "_vmap": 1, "_extension": 2,
         "_flash_attn_args": 2, "interface": 3, "varlen": 3, "kv_cache": 3, "nested": 3, "flex": 3,
         "sdpa": 4, "flash_attn": 4, "simulator": 4, "__init__": 5, "integrations": 6,
         "judge": 0, "cli": 6, "__main__": 7}


def tracked(*patterns: str) -> list[Path]:
    """Files that git knows or would take, so that a file is checked before its first commit."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", *patterns], cwd=ROOT,
                            capture_output=True, text=True, check=True).stdout.split("\n")
    return [ROOT / name for name in listed if name and (ROOT / name).exists()]


def host_files() -> list[Path]:
    return [path for path in tracked("csrc/*.h", "csrc/*.cpp", "csrc/*.mm")
            if path.parent == ROOT / "csrc"]


def includes(path: Path) -> set[tuple[str, str]]:
    return {(kind, name) for kind, name in INCLUDE.findall(path.read_text())}


def quoted(path: Path) -> set[str]:
    return {name for kind, name in includes(path) if kind == '"'}


def broken_rules_of_metal(path: Path) -> set[str]:
    inside = {one.name for one in tracked("metal/*.h", "metal/*.metal")}
    system = {name for kind, name in includes(path) if kind == "<"}
    allowed = re.compile(r"metal_\w+$|stdint\.h$|cstd(int|def)$")
    return (quoted(path) - inside) | {name for name in system if not allowed.match(name)}


def broken_rules_of_host(path: Path) -> set[str]:
    names = {name for _, name in includes(path)}
    broken = set()
    if not ATEN_USERS.match(path.name):
        broken |= {name for name in names if ATEN.match(name)}
    if path.name in DEVICE_LAYER:
        broken |= {name for name in names if Path(name).name in ATTENTION_HEADERS}
    if path.suffix != ".mm":
        broken |= {name for name in names if name.startswith(("Metal/", "Foundation/", "ATen/mps"))}
    return broken | {name for name in names if "simulator/" in name}


def module_imports(text: str) -> set[str]:
    """The modules of the package that a module imports, without the package's name."""
    names = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = "torch_flash_mps" if node.level else ""
            source = ".".join(filter(None, (package, node.module)))
            names += [f"{source}.{alias.name}" for alias in node.names]
    found = {re.match(r"torch_flash_mps\.(\w+)", name) for name in names}
    return {match[1] for match in found if match} & RANKS.keys()


def broken_rules_of_python(path: Path) -> set[str]:
    first = path.relative_to(ROOT / "torch_flash_mps").parts[0].removesuffix(".py")
    assert first in RANKS, f"{path.name}: say in RANKS what it may import"
    return {name for name in module_imports(path.read_text())
            if name != first and RANKS[name] >= RANKS[first]}


def test_no_generated_or_binary_file_is_tracked():
    listed = tracked("*")
    assert [path for path in listed if b"\0" in path.read_bytes()] == []
    assert not [path for path in listed if path.name in ("_build_info.py", "metal_sources.cpp")]


@pytest.mark.parametrize("path", tracked("metal/*.h", "metal/*.metal"), ids=lambda path: path.name)
def test_metal_includes_only_metal(path):
    assert not broken_rules_of_metal(path)


def test_constants_of_kernels_call_no_library_function():
    """Apple does not say which functions of metal_stdlib are constexpr."""
    constants = [sentence for path in tracked("metal/*.h", "metal/*.metal")
                 for sentence in re.findall(r"\bconstexpr\b[^;{]*=[^;]*;", path.read_text())]
    assert len(constants) > 20
    assert not [sentence for sentence in constants if "metal::" in sentence]


@pytest.mark.parametrize("path", host_files(), ids=lambda path: path.name)
def test_host_includes_point_one_way(path):
    assert not broken_rules_of_host(path)


@pytest.mark.parametrize("path", tracked("torch_flash_mps/*.py"),
                         ids=lambda path: str(path.relative_to(ROOT / "torch_flash_mps")))
def test_python_imports_point_one_way(path):
    assert not broken_rules_of_python(path)


@pytest.mark.parametrize("path", tracked("*.metal", "*.h", "*.cpp", "*.mm", "*.py"),
                         ids=lambda path: str(path.relative_to(ROOT)))
def test_file_is_within_its_budget(path):
    lines = path.read_text().count("\n")
    assert lines <= BUDGETS.get(path.name, BUDGETS[path.suffix])


def test_planted_violations_are_found(tmp_path, monkeypatch):
    """Each rule sees the include or import that it forbids."""
    def write(name: str, text: str) -> Path:
        path = tmp_path / "torch_flash_mps" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    monkeypatch.setattr(f"{__name__}.tracked", lambda *patterns: [tmp_path / "tile.h"])
    both = write("a.metal", '#include "tile.h"\n#include "ops.h"')
    assert broken_rules_of_metal(both) == {"ops.h"}
    assert broken_rules_of_host(write("tiling.cpp", "#include <ATen/ATen.h>")) == {"ATen/ATen.h"}
    assert broken_rules_of_host(write("device_metal.mm", '#include "tiling.h"')) == {"tiling.h"}
    assert broken_rules_of_host(write("ops.cpp", "#import <Metal/Metal.h>")) == {"Metal/Metal.h"}
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    text = "from torch_flash_mps import interface, reference\nfrom . import simulator\n"
    assert broken_rules_of_python(write("_ops.py", text)) == {"interface", "simulator"}
