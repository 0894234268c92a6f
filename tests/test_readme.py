"""README.md against what the package does. Its snippets run as doctests (see the Makefile)."""

import doctest

from support_table import README, TABLE, support_table


def test_DC_04_support_table_is_what_the_device_answers(device):
    assert TABLE.in_document() == support_table()


def test_DC_01_DC_02_snippets_are_true():
    result = doctest.testfile(str(README), module_relative=False)
    assert result.attempted > 8
    assert result.failed == 0


def test_speed_on_an_apple_gpu_is_not_claimed():
    assert "speed on an Apple GPU has not been measured" in " ".join(README.read_text().split())
