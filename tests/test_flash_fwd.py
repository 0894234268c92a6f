"""The forward kernel over shapes, dtypes, layouts and masks, against the float64 oracle."""

from dataclasses import replace

import pytest
import torch
from cases import DTYPE_NAMES, DTYPES, GQA, LAYOUT, MASKED, MASKS, MODELS, SMOKE, Case, make_inputs
from checks import check_case, check_lse, check_same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SEQLENS_Q = [*range(1, 10), 15, 16, 17, 31, 32, 33, 63, 64, 65]
SEQLENS_K = [*SEQLENS_Q, 127, 128, 129, 512]
HEAD_DIMS = [
    1, 2, 3, 7, 8, 16, 24, 27, 32, 40, 48, 64, 72, 80, 96, 100, 112, 120, 128, 160, 192, 256,
    320, 512, 576,
]


def _ids(cases):
    return [case.id for case in cases]


def _dtype_id(dtype):
    return DTYPE_NAMES[dtype]


@pytest.mark.parametrize("case", SMOKE, ids=_ids(SMOKE))
def test_smoke(device, checked, case):
    check_case(case, device)


@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS.keys())
def test_models(device, case):
    check_case(case, device)


@pytest.mark.parametrize("case", LAYOUT, ids=_ids(LAYOUT))
def test_layouts(device, case):
    check_case(case, device)


@pytest.mark.parametrize("case", MASKED, ids=_ids(MASKED))
def test_masks(device, case):
    check_case(case, device)


@pytest.mark.parametrize("case", GQA, ids=_ids(GQA))
def test_KF_18_grouped_heads(device, case):
    check_case(case, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=_dtype_id)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_KF_12_head_dims(device, dtype, head_dim):
    check_case(Case(1, 2, 1, 33, 45, head_dim, dtype=dtype), device)


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 1, 1, 16, 16, 32, 24),
        Case(1, 1, 1, 8, 8, 4, 2),
        Case(1, 4, 4, 40, 40, 192, 128, dtype=torch.float16),
        Case(1, 2, 2, 9, 9, 64, 128, dtype=torch.bfloat16),
        Case(1, 1, 1, 17, 33, 1, 256),
    ],
    ids=lambda case: case.id,
)
def test_KF_11_head_dim_of_value_differs(device, case):
    first = check_case(case, device)
    assert first.shape[-1] == case.head_dim_v
    check_same_bits(check_case(case, device), first)


@pytest.mark.parametrize("dtype", DTYPES, ids=_dtype_id)
@pytest.mark.parametrize("seqlen_q", SEQLENS_Q)
def test_KF_23_lengths_around_tile_edges(device, dtype, seqlen_q):
    for seqlen_k in SEQLENS_K:
        case = Case(1, 1, 1, seqlen_q, seqlen_k, dtype=dtype)
        for one in (case, replace(case, causal=True), replace(case, mask="bool")):
            check_case(one, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=_dtype_id)
def test_KF_23_rows_do_not_depend_on_how_many_there_are(device, dtype):
    inputs = make_inputs(Case(1, 1, 1, 9, 129, dtype=dtype), device)
    query, key, value = inputs.operands
    nine = torch.ops.flash_mps.attention(query, key, value)
    eight = torch.ops.flash_mps.attention(query[:, :, :8], key, value)
    torch.testing.assert_close(eight.cpu(), nine[:, :, :8].cpu(), rtol=1e-3, atol=1e-3)


LSE = [
    Case(2, 4, 2, 35, 70, dtype=dtype, causal=causal, mask=mask)
    for dtype in DTYPES
    for causal, mask in ((False, None), (True, None), (True, "bool"), (False, "float"))
]


@pytest.mark.parametrize("case", LSE, ids=_ids(LSE))
def test_lse(device, case):
    inputs = make_inputs(case, device)
    check_lse(*inputs.operands, **inputs.options, case_id=case.id)


CHECKED = [
    Case(2, 4, 2, 37, 75, head_dim, dtype=dtype, causal=causal, mask=mask, layout=layout)
    for dtype, head_dim, causal, mask, layout in (
        (torch.float32, 27, True, "bool", "sliced"),
        (torch.float16, 64, True, "float", "bshd"),
        (torch.bfloat16, 100, False, "float32", "sliced"),
        (torch.float16, 128, True, None, "bshd"),
        (torch.float32, 256, False, None, "sliced"),
        (torch.float16, 256, True, None, "sliced"),
    )
]


@pytest.mark.parametrize("case", CHECKED, ids=_ids(CHECKED))
def test_checked_and_shuffled(device, checked, seed, case):
    check_case(case, device, seed)


@st.composite
def _cases(draw):
    num_heads_kv = draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from([1, 8, 27, 64]))
    return Case(
        batch=draw(st.integers(1, 3)),
        num_heads_q=num_heads_kv * draw(st.integers(1, 4)),
        num_heads_kv=num_heads_kv,
        seqlen_q=draw(st.integers(1, 80)),
        seqlen_k=draw(st.integers(1, 140)),
        head_dim=head_dim,
        head_dim_v=draw(st.sampled_from([head_dim, 64])),
        dtype=draw(st.sampled_from(DTYPES)),
        causal=draw(st.booleans()),
        mask=draw(st.sampled_from([None, *MASKS])),
        layout=draw(st.sampled_from(["sliced", "bshd", "strided"])),
        scale=draw(st.sampled_from([None, 0.0, -0.2, 0.25])),
    )


SAME_EVERY_TIME = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@settings(SAME_EVERY_TIME, max_examples=300)
@given(case=_cases(), inputs_seed=st.integers(0, 2**16))
def test_any_case(device, case, inputs_seed):
    check_case(case, device, inputs_seed)


@settings(SAME_EVERY_TIME, max_examples=40)
@given(case=_cases(), inputs_seed=st.integers(0, 2**16))
def test_any_case_checked_and_shuffled(device, checked, case, inputs_seed):
    check_case(case, device, inputs_seed)
