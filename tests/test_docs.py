"""The pages of docs/ against the library."""

import re
import sys

import pytest

if sys.platform == "darwin":
    pytest.skip("only the simulated device counts", allow_module_level=True)

import backward_table
import decode_table
import numpy as np
import torch
from backward_table import ROOT, backward_rows, line, products, registers, threadgroup_bytes
from cases import Case, make_inputs
from decode_table import decode_rows

import torch_flash_mps
from benchmarks.counting import on_path


def test_backward_table_is_that_of_the_library():
    assert backward_table.TABLE.in_document() == backward_table.backward_table()


@pytest.mark.parametrize("row", backward_rows(), ids=lambda row: "-".join(line(row)[:4]))
def test_backward_row_keeps_its_budget(row):
    """A lane has 128 registers; a few go to addresses and the fragment at hand."""
    assert sum(registers(row).values()) <= 112
    assert sum(registers(row).values()) + registers(row)["S"] <= 116   # with a softcap
    assert threadgroup_bytes(row) <= 32768


def test_decode_table_is_that_of_the_library():
    assert decode_table.TABLE.in_document() == decode_table.decode_table()


@pytest.mark.parametrize("row", decode_rows(), ids=lambda row: "-".join(row.line[:5]))
def test_decode_row_keeps_its_budget(row):
    assert sum(row.registers.values()) <= 114
    assert row.threadgroup_bytes <= 32768


def test_decode_rows_are_those_of_the_kernel(simulator):
    """A kernel writes the sizes that follow from the template arguments of each row."""
    contract = (ROOT / "metal" / "attn_params.h").read_text()
    ids = re.findall(r"k(\w+)Constant = (\d+)", contract)
    constants = {int(number): ("int", 0) if name == "MaskKind" else ("bool", False)
                 for name, number in ids}
    types = {1: "half, char", 2: "half, half", 4: "float, float"}
    lines = []
    for i, row in enumerate(decode_rows()):
        lines.append(f"""{{
          using Tile = flash_mps::DecodeTile<{types[row.kv_bytes]}, {row.dim}, {row.dim},
              {row.rows}, {row.block_k}, {row.simdgroups}, {"true" if row.is_staged else "false"}>;
          out[{3 * i}] = Tile::kLaneElements;
          out[{3 * i + 1}] = Tile::kKeys;
          out[{3 * i + 2}] = Tile::kThreadgroupBytes;
        }}""")
    source = torch_flash_mps._extension.extension().metal_source("flash_decode")
    sizes = simulator.Library(
        source + f"kernel void sizes(device int* out [[buffer(0)]]) {{ {''.join(lines)} }}"
    ).kernel("sizes", constants)
    found = np.zeros((len(lines), 3), dtype=np.int32)
    sizes(found, grid=(1, 1, 1), threadgroup=(1, 1, 1))
    assert found.tolist() == [
        [row.lane_words * row.elements, row.keys, row.threadgroup_bytes] for row in decode_rows()
    ]


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    assert links
    for link in links:
        assert (page.parent / link).resolve().is_relative_to(ROOT)
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("head_dim", (128, 256, 576))
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
