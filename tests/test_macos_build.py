"""The macOS build refuses what a Mac would refuse. `make macos` is the build that must pass."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from build_support import macos

ROOT = Path(__file__).resolve().parent.parent
DEVICE_LAYER = ("device.h", "device.cpp", "device_metal.mm", "metal_language.h")


@pytest.fixture(scope="module")
def torch_tree():
    oldest = macos.oldest_version(macos.supported_range())
    return macos.fetch_torch(f"torch=={oldest}")


@pytest.fixture
def project(tmp_path) -> Path:
    """The device layer alone, which is quick to build."""
    (tmp_path / "csrc").mkdir()
    for name in DEVICE_LAYER:
        shutil.copy(ROOT / "csrc" / name, tmp_path / "csrc")
    shutil.copy(ROOT / "csrc" / "metal_sources.h", tmp_path / "csrc")
    return tmp_path


def plant(project: Path, text: str) -> None:
    with (project / "csrc" / "device_metal.mm").open("a") as source:
        source.write(text)


def test_device_layer_builds(project, torch_tree):
    symbols = macos.undefined_symbols(macos.build_extension(torch_tree, project))
    libraries = {one.symbol: one.library for one in symbols}
    assert libraries["__ZN2at3mps19getCurrentMPSStreamEv"] == "@rpath/libtorch_cpu.dylib"
    assert libraries["_objc_msgSend"] is None


@pytest.mark.parametrize(("fault", "message"), [
    ("void planted(id<MTLBuffer> b) { [b contentz]; }\n", "'-contentz' not found"),
    ("SEL planted() { return @selector(makeCoffee:); }\n", "undeclared selector 'makeCoffee:'"),
    ("void planted() { int unused; }\n", "unused variable 'unused'"),
], ids=["method", "selector", "warning"])
def test_compiler_refuses(project, torch_tree, capfd, fault, message):
    plant(project, fault)
    with pytest.raises(macos.BuildFailure):
        macos.build_extension(torch_tree, project)
    assert message in capfd.readouterr().out


@pytest.mark.parametrize("symbol", ["at::mps::planted", "planted_framework_function"])
def test_symbol_that_no_library_defines_is_refused(project, torch_tree, symbol):
    namespace, _, name = symbol.rpartition("::")
    declaration = f"void {name}();"
    if namespace:
        declaration = f"namespace {namespace} {{ {declaration} }}"
    plant(project, f"{declaration}\nvoid call_planted() {{ {symbol}(); }}\n")
    with pytest.raises(macos.BuildFailure, match=name):
        macos.build_extension(torch_tree, project)


def test_newest_and_oldest_torch_of_the_range():
    assert macos.oldest_version("torch>=2.13,<2.16") == "2.13.0"
    assert macos.oldest_version("torch>=2.13.1,<3") == "2.13.1"
    with pytest.raises(ValueError, match="lower bound"):
        macos.oldest_version("torch<3")
    assert macos.supported_range().startswith("torch>=")
