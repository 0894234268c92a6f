"""docs/backward.md against the library."""

import re
import sys

import pytest

if sys.platform == "darwin":
    pytest.skip("only the simulated device counts", allow_module_level=True)

import torch
from backward_table import (
    DOCUMENT,
    ROOT,
    backward_rows,
    backward_table,
    line,
    products,
    registers,
    table_in_document,
    threadgroup_bytes,
)
from cases import Case, make_inputs

import torch_flash_mps
from benchmarks.counting import on_path


def test_backward_table_is_that_of_the_library():
    assert table_in_document() == backward_table()


@pytest.mark.parametrize("row", backward_rows(), ids=lambda row: "-".join(line(row)[:4]))
def test_backward_row_keeps_its_budget(row):
    """A lane has 128 registers; a few go to addresses and the fragment at hand."""
    assert sum(registers(row).values()) <= 112
    assert threadgroup_bytes(row) <= 32768


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", DOCUMENT.read_text())
    assert links
    for link in links:
        assert (DOCUMENT.parent / link).resolve().is_relative_to(ROOT)
        assert (DOCUMENT.parent / link).exists(), link


@pytest.mark.parametrize("head_dim", (128, 256))
def test_products_of_a_block_are_those_of_the_table(device, simulator, head_dim):
    seqlen, dtype = 64, torch.float16
    inputs = make_inputs(Case(seqlen_q=seqlen, seqlen_k=seqlen, head_dim=head_dim, dtype=dtype),
                         device)
    operands = [x.detach().requires_grad_() for x in inputs.operands]
    with on_path("staged"):
        simulator.reset_counters()
        torch_flash_mps.attention(*operands).sum().backward()
        found = {counts["kernel"]: counts["matrix_products"] for counts in simulator.counters()}
    one_product = (seqlen // 8) ** 2 * head_dim // 8
    for kernel in ("flash_bwd_dq", "flash_bwd_dkv"):
        (row,) = (row for row in backward_rows() if row["op"] == kernel
                  and row["family"] == "apple7" and row["element_bytes"] == dtype.itemsize
                  and row["max_head_dim"] == head_dim)
        (count,) = (n for name, n in found.items() if name.startswith(f"{kernel}_"))
        assert count == products(row) * one_product, kernel
