"""Every row of the tiling table runs, in checked mode and in a shuffled order of threads."""

import pytest
from cases import DTYPE_NAMES, DTYPES, Case, make_inputs
from checks import check_case, check_lse
from tilings import tiling_cases, tilings

import torch_flash_mps

TILINGS = tilings("flash_fwd")


@pytest.mark.parametrize(("tiling", "dtype"), tiling_cases("flash_fwd"))
def test_instance(device, checked, on_family, seed, tiling, dtype):
    if not on_family(tiling["family"]):
        return   # a Mac has one family, whose rows are tested there
    block_q, block_k, head_dim = tiling["block_q"], tiling["block_k"], tiling["max_head_dim"]
    case = Case(
        1, 2, 1, block_q + 3, 2 * block_k + 3, head_dim - 3, head_dim, dtype,
        causal=True, mask="bool_rows",
    )
    inputs = make_inputs(case, device, seed)
    plan = torch_flash_mps.explain(
        *inputs.operands, **inputs.options, enable_gqa=True, return_lse=True
    )
    assert {key: plan[key] for key in ("block_q", "block_k", "path", "home")} == {
        key: tiling[key] for key in ("block_q", "block_k", "path", "home")
    }
    check_lse(*inputs.operands, **inputs.options, case_id=case.id)


@pytest.mark.parametrize("family", ["apple7", "apple9", "apple10"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES.get)
def test_families_agree(device, on_family, family, dtype):
    if on_family(family):
        for seqlen_q in (1, 8, 9, 33):
            for seqlen_k in (1, 16, 31, 65):
                check_case(Case(1, 2, 1, seqlen_q, seqlen_k, 64, dtype=dtype, causal=True), device)


def test_the_table_covers_every_head_dim():
    for family in ("apple7", "apple9", "apple10"):
        for element_bytes in {dtype.itemsize for dtype in DTYPES}:
            widths = [
                tiling["max_head_dim"]
                for tiling in TILINGS
                if (tiling["family"], tiling["element_bytes"]) == (family, element_bytes)
            ]
            assert widths == sorted(widths) and widths[-1] == 256
    assert {tiling["path"] for tiling in TILINGS} == {"staged", "direct"}
    assert {tiling["home"] for tiling in TILINGS} == {"registers", "device"}
