"""BD-05: the Metal language version is stated, and what an older one lacks is refused."""

import re
import sys
from pathlib import Path

import pytest

from torch_flash_mps._extension import extension

if sys.platform == "darwin":
    pytest.skip("a Mac has Apple's compiler", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
OPS = sorted(path.stem for path in (ROOT / "metal").glob("*.metal"))
KERNEL = """#include <metal_stdlib>
kernel void run(device {0}* out [[buffer(0)]]) {{ out[0] = {0}(__METAL_VERSION__); }}
"""


@pytest.mark.parametrize("version", [310, 320, 400])
@pytest.mark.parametrize("op", OPS)
def test_BD_05_kernels_are_legal_in_every_version(simulator, op, version):
    assert simulator.Library(extension().metal_source(op), language_version=version) is not None


def test_BD_05_bfloat_needs_metal_3_1(simulator):
    simulator.Library(KERNEL.format("bfloat"), language_version=310)
    refused = r"program_source:2:\d+: error: unknown type name 'bfloat': it needs Metal 3\.1"
    with pytest.raises(RuntimeError, match=refused):
        simulator.Library(KERNEL.format("bfloat"), language_version=300)
    for other in ("half", "float"):
        simulator.Library(KERNEL.format(other), language_version=300)


@pytest.mark.parametrize("version", [300, 310, 400])
def test_a_source_can_ask_for_the_version(simulator, version):
    source = KERNEL.format("float") + f"static_assert(__METAL_VERSION__ == {version}, \"other\");"
    assert simulator.Library(source, language_version=version).function_names == ["run"]


def test_BD_05_the_device_states_the_version_it_compiles_for():
    """The first with bfloat: what the system's compiler takes by default is no part of a build."""
    source = (ROOT / "csrc/device_metal.mm").read_text()
    assert re.findall(r"setLanguageVersion:(.*)\]", source) == [
        "static_cast<MTLLanguageVersion>(kMetalLanguage)"]
    assert extension().metal_language == "3.1"
