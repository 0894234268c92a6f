"""The pages of docs/ about libraries: their examples run as doctests."""

import doctest
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.mark.parametrize("name", ["flex_attention", "flash_attn", "diffusers", "transformers"])
def test_DC_02_examples_of_the_page_are_true(device, name):
    result = doctest.testfile(str(DOCS / f"{name}.md"), module_relative=False)
    assert result.attempted >= 8
    assert result.failed == 0
