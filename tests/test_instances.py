"""Every row of the tiling table runs, in checked mode and in a shuffled order of threads."""

import pytest
import torch
from cases import DTYPE_NAMES, DTYPES, Case, make_inputs, poisoned
from checks import LSE_TOLERANCE, attention_lowp, check, check_case, check_exact, check_lse
from tilings import tiling_cases, tilings

import torch_flash_mps
from torch_flash_mps.reference import attention_ref

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


def decode_instances() -> list:
    """Each row of flash_decode with a number of query rows that it is taken for."""
    instances, held = [], {}
    for index, row in enumerate(tilings("flash_decode")):
        width = row["element_bytes"], row["max_head_dim"]
        num_rows = held.get(width, 0) + 1
        held[width] = row["block_q"] * (row["num_simdgroups"] if row["path"] == "staged" else 1)
        dtypes = [dtype for dtype in DTYPES if dtype.itemsize == row["element_bytes"]]
        for dtype in dtypes or [torch.float16]:
            name = f"b{row['element_bytes']}-d{row['max_head_dim']}-rows{num_rows}"
            instances.append(pytest.param(row, num_rows, dtype, 1 + index % 2,
                                          id=f"{name}-{DTYPE_NAMES[dtype]}"))
    return instances


def as_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of int8, their scales, and what they stand for in float64."""
    numbers = torch.randint(-127, 128, x.shape, dtype=torch.int8)
    scale = 0.005 + torch.rand(x.shape[:-1]) / 100
    return (poisoned(numbers, x.device, "aligned"), poisoned(scale, x.device),
            numbers.double() * scale.double().unsqueeze(-1))


@pytest.mark.parametrize(("tiling", "num_rows", "dtype", "num_splits"), decode_instances())
def test_decode_instance(device, checked, simulator, seed, tiling, num_rows, dtype, num_splits):
    head_dim = tiling["max_head_dim"]
    case = Case(1, num_rows, 1, 1, 150, head_dim, head_dim - 3, dtype, mask="bool_heads",
                layout="aligned")
    inputs = make_inputs(case, device, seed)
    query, *stored = inputs.operands
    options, meant = {"attn_mask": inputs.attn_mask}, stored
    if tiling["element_bytes"] == 1:
        stored, scales, meant = zip(*map(as_int8, stored), strict=True)
        options |= dict(zip(("k_scale", "v_scale"), scales, strict=True))
    if simulator is not None:
        simulator.reset_counters()
    out, lse = torch.ops.flash_mps.attention_with_kvcache(
        query, *stored, **options, num_splits=num_splits)
    ref, ref_lse = attention_ref(query, *meant, attn_mask=inputs.attn_mask)
    lowp = attention_lowp(query, *(x.to(dtype) for x in meant), attn_mask=inputs.attn_mask)
    check(out, ref, lowp, case_id=case.id)
    check_exact(lse, ref_lse, LSE_TOLERANCE, case_id=f"{case.id} lse")
    if simulator is not None:
        block_k = f"_bk{tiling['block_k']}" if tiling["block_k"] else ""
        name = f"_bq{tiling['block_q']}{block_k}_sg{tiling['num_simdgroups']}"
        assert name in simulator.counters()[0]["kernel"]


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
            assert widths == sorted(widths) and widths[-1] == 576
    assert {tiling["path"] for tiling in TILINGS} == {"staged", "direct"}
    assert {tiling["home"] for tiling in TILINGS} == {"registers", "device"}
