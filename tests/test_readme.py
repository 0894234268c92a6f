"""README.md against what the package does. Its snippets run as doctests (see the Makefile)."""

import doctest
import re

import options_table
from support_table import README, TABLE, support_table


def test_DC_04_support_table_is_what_the_device_answers(device):
    assert TABLE.in_document() == support_table()


def test_DC_04_options_are_those_that_each_entry_point_takes(device):
    assert options_table.TABLE.in_document() == options_table.options_table()


def test_DC_01_DC_02_snippets_are_true():
    result = doctest.testfile(str(README), module_relative=False)
    assert result.attempted > 8
    assert result.failed == 0


def test_speed_on_an_apple_gpu_is_not_claimed():
    assert "speed on an Apple GPU has not been measured" in " ".join(README.read_text().split())


def test_DC_05_text_about_long_work_names_a_next_step():
    """The limit that the README tells to lower is the one that the code reads."""
    root = README.parent
    section = README.read_text().split("## Very long sequences\n")[1].split("\n## ")[0]
    (variable,) = re.findall(r"`(\w+)=1e11 python", section)
    assert f'getenv("{variable}")' in (root / "csrc" / "flash_launch.cpp").read_text()
    told = [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("csrc/*.*"),
            *root.glob("torch_flash_mps/**/*.py")]
    # It lets the process take all memory of the machine.
    assert not [path.name for path in told if "WATERMARK_RATIO" in path.read_text()]
