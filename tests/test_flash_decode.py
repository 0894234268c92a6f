"""Few query rows over shapes, dtypes, layouts and masks, against the float64 oracle."""

import sys
from dataclasses import replace

import pytest
import torch
from cases import DTYPES, LAYOUTS, MASKS, Case, make_inputs
from checks import LSE_TOLERANCE, check, check_exact, check_same_bits
from decoding import ENTRIES, MAX_ROWS, check_decode, decode
from hypothesis import given, settings
from hypothesis import strategies as st
from test_flash_fwd import HEAD_DIMS, SAME_EVERY_TIME, _dtype_id, _ids

from torch_flash_mps import merge_states
from torch_flash_mps.reference import attention_ref, visible_pairs

FULL_SIZE = sys.platform == "darwin"
ROWS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16]
SEQLENS_K = [*range(1, 10), 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 512]


@pytest.fixture(params=ENTRIES.values(), ids=ENTRIES.keys())
def entry(request) -> int | None:
    return request.param


def check_decode_case(num_splits, case, device, seed=0):
    if num_splits is not None and case.layout == "strided":
        case = replace(case, layout="aligned")   # a cache is never copied, so its rows are dense
    inputs = make_inputs(case, device, seed)
    return check_decode(num_splits, *inputs.operands, **inputs.options, case_id=case.id)


@pytest.mark.parametrize("dtype", DTYPES, ids=_dtype_id)
@pytest.mark.parametrize("rows", ROWS)
def test_KF_23_lengths_around_tile_edges(device, dtype, rows):
    """In splits, some of them empty; test_flash_fwd.py has the op."""
    for seqlen_k in SEQLENS_K:
        case = Case(1, 1, 1, rows, seqlen_k, dtype=dtype)
        for one in (case, replace(case, causal=True), replace(case, mask="bool")):
            check_decode_case(5, one, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=_dtype_id)
@pytest.mark.parametrize("seqlen_k", [1, 33, 129, 700])
def test_KF_23_rows_do_not_depend_on_how_many_there_are(device, entry, dtype, seqlen_k):
    """One row more than the decode kernel takes: it and the forward kernel agree as well."""
    q, k, v = make_inputs(Case(2, 6, 2, MAX_ROWS + 1, seqlen_k, dtype=dtype), device).operands
    many = decode(entry, q, k, v)
    ref, _ = attention_ref(q, k, v)
    error = (many[0].cpu().double() - ref).abs().max().item()
    for rows in (1, 8, 9, MAX_ROWS):
        out, lse = decode(entry, q[:, :, :rows], k, v)
        check_exact(out, many[0][:, :, :rows], 2 * error + 1e-6)
        check_exact(lse, many[1][:, :, :rows], LSE_TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES, ids=_dtype_id)
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 320, 512, 576])
def test_KF_12_head_dims(device, dtype, head_dim):
    case = Case(1, 3, 1, 2, 45, head_dim, dtype=dtype)
    for layout in ("sliced", "aligned"):
        check_decode_case(None, replace(case, layout=layout), device)


VALUE_DIMS = [
    Case(1, 1, 1, 16, 16, 32, 24),
    Case(1, 1, 1, 8, 8, 4, 2),
    Case(1, 4, 4, 3, 40, 192, 128, dtype=torch.float16),
    *(Case(1, 16, 1, 1, 77, 576, 512, dtype=dtype) for dtype in DTYPES),
    Case(1, 4, 1, 16, 40, 576, 512, dtype=torch.bfloat16),
    Case(1, 2, 2, 9, 9, 64, 128, dtype=torch.bfloat16),
    Case(2, 3, 1, 5, 33, 1, 256),
    Case(2, 3, 1, 5, 33, 200, 3),
]


@pytest.mark.parametrize("case", VALUE_DIMS, ids=_ids(VALUE_DIMS))
def test_KF_11_head_dim_of_value_differs(device, entry, case):
    first = check_decode_case(entry, case, device)
    assert first[0].shape[-1] == case.head_dim_v
    for got, before in zip(check_decode_case(entry, case, device), first, strict=True):
        check_same_bits(got, before)


MIXED = [
    Case(2, 4, 2, rows, 70, dtype=dtype, causal=causal, mask=mask, layout=layout)
    for rows, dtype, causal in ((1, torch.float16, False), (9, torch.bfloat16, True),
                                (16, torch.float32, False))
    for mask, layout in zip([None, *MASKS], (LAYOUTS * 3), strict=False)
]


@pytest.mark.parametrize("case", MIXED, ids=_ids(MIXED))
def test_masks_and_layouts(device, entry, case):
    check_decode_case(entry, case, device)


RATIOS = [1, 2, 3, 4, 5, 7, 8, 14, 16, 31, 32]


@pytest.mark.parametrize("ratio", RATIOS)
def test_KF_18_grouped_heads(device, entry, ratio):
    for batch, kv_heads, rows, mask in (
        (1, 1, 1, None), (3, 2, 1, "bool_heads"), (1, 2, 3, "bool"), (1, 1, 16, "float_heads"),
    ):
        case = Case(batch, ratio * kv_heads, kv_heads, rows, 37, 64, mask=mask)
        check_decode_case(entry, case, device)


@pytest.mark.parametrize("mask", ["bool_heads", "float_heads", "bool_rows"])
@pytest.mark.parametrize("head_dim", [64, 320])
def test_KF_18_a_group_beyond_one_block_of_rows(device, entry, head_dim, mask):
    for group_size, rows in ((70, 1), (70, 3), (9, 2)):
        check_decode_case(entry, Case(1, group_size, 1, rows, 37, head_dim, mask=mask), device)


@pytest.mark.parametrize("first", [1004, 4076])
def test_DE_04_a_stream_of_steps(device, entry, first):
    """Each step sees one key more, in a cache with poison beyond."""
    steps, sizes = 40, (32, 8, 128) if FULL_SIZE else (4, 1, 16)
    *heads, head_dim = sizes
    case = Case(1, *heads, steps, first + steps, head_dim, dtype=torch.float16, layout="aligned")
    q, k, v = make_inputs(case, device).operands
    for step in range(steps):
        seen = first + step
        operands = q[:, :, step : step + 1], k[:, :, :seen], v[:, :, :seen]
        got = check_decode(entry, *operands, case_id=f"{seen} keys")
        for one, other in zip(got, decode(entry, *operands), strict=True):
            check_same_bits(one, other)


CHUNKS = [17, 1, 5, 8, 9]


@pytest.mark.parametrize("dtype", DTYPES, ids=_dtype_id)
def test_DE_09_chunks_equal_the_full_run(device, entry, dtype):
    total = sum(CHUNKS)
    q, k, v = make_inputs(Case(2, 4, 2, total, total, dtype=dtype), device).operands
    ref = attention_ref(q, k, v, is_causal=True)
    full = decode(None, q, k, v, is_causal=True)
    begin = 0
    for rows in CHUNKS:
        end = begin + rows
        mask = visible_pairs(rows, end, is_causal=True, causal_offset=begin).to(device)
        options = {"attn_mask": mask} if entry is None else {"is_causal": True}
        out, lse = check_decode(entry, q[:, :, begin:end], k[:, :, :end], v[:, :, :end], **options)
        check(out, ref[0][:, :, begin:end], full[0][:, :, begin:end])
        check_exact(lse, ref[1][:, :, begin:end], LSE_TOLERANCE)
        begin = end


def test_parts_of_the_keys_merge_to_the_whole(device, entry):
    q, k, v = make_inputs(Case(2, 6, 2, 5, 129), device).operands
    whole = decode(entry, q, k, v)
    begin, merged = 0, None
    for end in (1, 33, 34, 129):
        part = decode(entry, q, k[:, :, begin:end], v[:, :, begin:end])
        merged = part if merged is None else merge_states(*merged, *part)
        begin = end
    for got, expected in zip(merged, whole, strict=True):
        check_exact(got, expected, 2e-6)


@pytest.mark.parametrize("mask", [None, "float"])
@pytest.mark.parametrize("dtype", DTYPES, ids=_dtype_id)
def test_same_bits_in_every_order_of_threads(device, simulator, entry, dtype, mask):
    inputs = make_inputs(Case(2, 6, 2, 5, 300, dtype=dtype, mask=mask), device)
    first = decode(entry, *inputs.operands, **inputs.options)
    try:
        for order in (None, 1, 2, 3):
            if simulator is not None:
                simulator.shuffle(order)
            again = decode(entry, *inputs.operands, **inputs.options)
            for one, other in zip(again, first, strict=True):
                check_same_bits(one, other)
    finally:
        if simulator is not None:
            simulator.shuffle(None)


@st.composite
def _cases(draw):
    num_heads_kv = draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from([27, 64]))
    return Case(
        batch=draw(st.integers(1, 3)),
        num_heads_q=num_heads_kv * draw(st.one_of(st.integers(1, 4), st.integers(1, 32))),
        num_heads_kv=num_heads_kv,
        seqlen_q=draw(st.one_of(st.just(1), st.integers(1, MAX_ROWS))),
        seqlen_k=draw(st.integers(1, 130)),
        head_dim=head_dim,
        head_dim_v=draw(st.sampled_from([head_dim, 64])),
        dtype=draw(st.sampled_from(DTYPES)),
        causal=draw(st.booleans()),
        mask=draw(st.sampled_from([None, *MASKS])),
        layout=draw(st.sampled_from(LAYOUTS)),
        scale=draw(st.sampled_from([None, 0.0, -0.2, 0.25])),
    )


@settings(SAME_EVERY_TIME, max_examples=200)
@given(case=_cases(), entry=st.sampled_from([*ENTRIES.values()]), seed=st.integers(0, 2**16))
def test_any_case(device, case, entry, seed):
    check_decode_case(entry, case, device, seed)


@settings(SAME_EVERY_TIME, max_examples=40)
@given(case=_cases(), entry=st.sampled_from([*ENTRIES.values()]), seed=st.integers(0, 2**16))
def test_any_case_checked_and_shuffled(device, checked, case, entry, seed):
    check_decode_case(entry, case, device, seed)
