"""The forward kernel on inputs whose result needs no random numbers, and on hostile values."""

import math
import sys

import pytest
import torch
from cases import DTYPES, Case, eye, make_inputs, ramp
from checks import check_attention, check_case, check_exact, check_same_bits

import torch_flash_mps
from torch_flash_mps.reference import attention_ref

FULL_SIZE = sys.platform == "darwin"
NAN = math.nan
INF = math.inf


@pytest.fixture(params=["mps", "cpu"])
def device(request, device):
    """Both devices: a model that moves to the CPU must keep its results."""
    return device if request.param == "mps" else torch.device("cpu")


def attention(*operands, **options):
    return torch.ops.flash_mps.attention(*operands, **options)


def _on(device, *tensors):
    return [x.to(device) for x in tensors]


@pytest.mark.parametrize("seqlen_k", [32832, 65600])
@pytest.mark.parametrize("masked", ["bool", "float"])
def test_KF_04_only_the_last_of_many_keys(device, seqlen_k, masked):
    query, key, value = ramp(3, seqlen_k)
    value = (value - (seqlen_k - 64)).clamp(min=0)
    mask = torch.arange(seqlen_k).reshape(1, 1, 1, -1) >= seqlen_k - 64
    if masked == "float":
        mask = torch.where(mask, 0.0, -1e4)
    out = attention(*_on(device, query * 0, key * 0, value, mask))
    check_exact(out, 31.5, 1e-4)


def test_KF_05_mask_rows_beyond_2_to_the_31(device):
    # Left uninitialised and hardly touched: 2 GiB of addresses, 8 MB of memory.
    torch.utils.deterministic.fill_uninitialized_memory = False
    base = torch.empty(2050, 2**20, dtype=torch.bool, device=device)
    mask = base[:, :64]
    mask.copy_(torch.arange(64) == torch.arange(2050)[:, None] % 64)
    out = attention(*_on(device, *ramp(2050, 64)), mask)
    check_exact(out[0, 0, :, 0], torch.arange(2050) % 64)


def _hidden(kind, visible):
    return {
        "bool": visible,
        "-inf": torch.where(visible, 0.0, -INF),
        "lowest": torch.where(visible, 0.0, torch.finfo(torch.float32).min),
        "-1e4": torch.where(visible, 0.0, -1e4),
    }[kind]


@pytest.mark.parametrize("kind", ["bool", "-inf", "lowest", "-1e4"])
@pytest.mark.parametrize(
    ("first", "last", "expected"), [(128, 440, 284.0), (440, 440, 440.0), (0, 0, 0.0)]
)
def test_KF_07_first_tiles_hidden(device, kind, first, last, expected):
    keys = torch.arange(441)
    mask = _hidden(kind, (keys >= first) & (keys <= last)).reshape(1, 1, 1, 441)
    check_exact(attention(*_on(device, *ramp(3, 441), mask)), expected, 1e-4)


@pytest.mark.parametrize("kind", ["bool", "-inf"])
@pytest.mark.parametrize("seqlen", [2, 8, 9, 64, 65])
def test_KF_08_rows_without_a_key_are_zero(device, kind, seqlen):
    visible = torch.zeros(seqlen, seqlen, dtype=torch.bool)
    visible[: seqlen // 2, : seqlen // 2] = True
    query, key, value = make_inputs(Case(1, 2, 2, seqlen, seqlen, 8)).operands
    mask = _hidden(kind, visible).to(device)
    out = check_attention(*_on(device, query, key, value), attn_mask=mask)
    assert not out[:, :, seqlen // 2 :].any()
    nothing = _hidden(kind, torch.zeros_like(visible)).to(device)
    out, lse = torch_flash_mps.attention(
        *_on(device, query, key, value), attn_mask=nothing, return_lse=True
    )
    assert not out.any()
    assert (lse == -INF).all()


def test_KF_08_a_finite_mask_never_means_no_key(device):
    for lowest in (torch.finfo(torch.float32).min, -1e30):
        mask = torch.full((1, 1, 3, 5), lowest)
        check_exact(attention(*_on(device, *ramp(3, 5), mask)), 2.0, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seqlen_q", [1, 4, 9, 40])
def test_KF_09_nan_in_a_query_stays_in_its_row(device, dtype, seqlen_q):
    query, key, value = make_inputs(Case(1, 1, 1, seqlen_q, 16, 64, dtype=dtype)).operands
    query[0, 0, 0, 0] = NAN
    out = check_attention(*_on(device, query, key, value))
    assert torch.isnan(out[0, 0, 0]).all()
    assert torch.isnan(out).sum() == 64


@pytest.mark.parametrize("operand", ["key", "value"])
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("seqlen", [4, 33, 130])
def test_KF_10_a_key_that_nobody_sees_gives_nothing(device, operand, bad, seqlen):
    query, key, value = ramp(seqlen - 1, seqlen)
    (key if operand == "key" else value)[:, :, -1] = bad
    operands = _on(device, query, key, value)
    expected = torch.arange(seqlen - 1) / 2
    check_exact(attention(*operands, is_causal=True)[0, 0, :, 0], expected, 1e-4)
    for kind in ("bool", "-inf"):
        mask = _hidden(kind, torch.arange(seqlen) < seqlen - 1).reshape(1, 1, 1, seqlen)
        check_exact(attention(*operands, mask.to(device)), seqlen / 2 - 1, 1e-4)


@pytest.mark.parametrize("seqlen", [4, 33, 130])
def test_KF_10_nan_in_a_key_stays_with_the_rows_that_see_it(device, seqlen):
    query, key, value = ramp(seqlen, seqlen)
    key[:, :, -1] = NAN
    out = attention(*_on(device, query, key, value), is_causal=True)[0, 0, :, 0]
    check_exact(out[:-1], torch.arange(seqlen - 1) / 2, 1e-4)
    assert torch.isnan(out[-1])


@pytest.mark.parametrize("seqlen_k", [6, 70])
def test_KF_13_products_beyond_float16(device, seqlen_k):
    query = torch.full((1, 1, 4, 128), 128.0, dtype=torch.float16)
    _, _, value = ramp(4, seqlen_k, 128, dtype=torch.float16)
    key = torch.full_like(value, 128.0)
    check_exact(attention(*_on(device, query, key, value)), (seqlen_k - 1) / 2)


def test_KF_14_scale_is_not_folded_into_query(device):
    query, key, value = ramp(1, 4, dtype=torch.float16)
    out = attention(*_on(device, query + 30000, key * 0, value), scale=4.0)
    check_exact(out, 1.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_KF_15_sums_beyond_float16(device, dtype):
    for seqlen_k, size in ((4, 60000.0), (4096, 60000.0), (70000, 1.0)):
        value = torch.full((1, 1, seqlen_k, 8), size).to(dtype)
        query, key = torch.zeros(1, 1, 2, 8, dtype=dtype), torch.zeros_like(value)
        check_exact(attention(*_on(device, query, key, value)), value[0, 0, 0, 0])


@pytest.mark.parametrize("causal", [False, True])
def test_KF_16_long_bfloat16(device, causal):
    shape = (2, 2, 500) if FULL_SIZE else (1, 1, 32)
    case = Case(1, *shape, 14000, 128, dtype=torch.bfloat16, causal=causal)
    inputs = make_inputs(case, device)
    out = check_attention(*inputs.operands, **inputs.options, case_id=case.id)
    ref, _ = attention_ref(*inputs.operands, **inputs.options)
    if not causal:
        assert (out.cpu().double() - ref).abs().max() < 0.01


def test_KF_17_causal_mask_and_causal_flag_together(device):
    for seqlen in range(1, 71):
        query, key, value = make_inputs(Case(1, 1, 1, seqlen, seqlen, 8), seed=seqlen).operands
        operands = _on(device, query, key, value)
        tril = torch.ones(seqlen, seqlen, dtype=torch.bool).tril().to(device)
        both = check_attention(*operands, attn_mask=tril, is_causal=True, case_id=str(seqlen))
        check_exact(both, attention(*operands, is_causal=True), 1e-6)
    zeros = torch.zeros(4, 16, device=device)
    inputs = make_inputs(Case(1, 2, 2, 4, 16, 64), device)
    check_attention(*inputs.operands, attn_mask=zeros, is_causal=True)


def test_KF_18_query_heads_read_their_own_kv_head(device):
    query = torch.zeros(1, 6, 2, 8)
    value = torch.arange(2.0).reshape(1, 2, 1, 1).expand(1, 2, 3, 8).contiguous()
    out = attention(*_on(device, query, value * 0, value), enable_gqa=True)
    check_exact(out[0, :, 0, 0], torch.tensor([0.0, 0, 0, 1, 1, 1]), 1e-6)


def test_KF_19_adding_a_constant_changes_nothing(device):
    query, key, value = make_inputs(Case(2, 4, 2, 3, 3, 8), device).operands
    ones = torch.ones(3, 3, device=device)
    masked = check_attention(query, key, value, attn_mask=ones)
    check_exact(masked, attention(query, key, value, enable_gqa=True), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_KF_20_every_head_and_batch_under_causal(device, dtype):
    query, key, value = (x.expand(2, 4, -1, -1).clone() for x in ramp(16, 16, 32))
    value += 100 * torch.arange(4).reshape(1, 4, 1, 1) + 1000 * torch.arange(2).reshape(2, 1, 1, 1)
    operands = [x.to(device, dtype) for x in (query, key, value)]
    expected = value[..., :1, :].double() + torch.arange(16.0).reshape(16, 1) / 2
    # float16 counts in whole numbers between 1024 and 2048.
    tolerance = 1e-3 if dtype == torch.float32 else 1.0
    check_exact(attention(*operands, is_causal=True), expected, tolerance)


@pytest.mark.parametrize("seqlen_q", [1, 8, 64])
@pytest.mark.parametrize("true", [1, 2, 255])
def test_KF_21_any_nonzero_byte_is_true(device, seqlen_q, true):
    query, key, value = make_inputs(Case(1, 1, 1, seqlen_q, 512, 64), device).operands
    mask = torch.full((seqlen_q, 512), true, dtype=torch.uint8, device=device).view(torch.bool)
    check_exact(attention(query, key, value, mask), attention(query, key, value), 1e-6)


def test_KF_22_one_key_and_a_number_for_each_head(device):
    x = make_inputs(Case(1, 8, 8, 1, 1, 64)).query
    mask = torch.tensor([3.5, 0.453, 3.19, 0.97, -5.47, 5.19, 2.16, 0.54]).reshape(1, 8, 1, 1)
    out = attention(*_on(device, x, x, x, mask), scale=1.0)
    check_same_bits(out, x)
    out = attention(*_on(device, x[0], x[0], x[0], mask[0]), scale=1.0)
    check_same_bits(out, x[0])


@pytest.mark.parametrize("entry", ["op", "function", "function with lse"])
@pytest.mark.parametrize("hidden_by", ["is_causal", "mask", "both"])
def test_KF_26_the_future_never_changes_the_past(device, entry, hidden_by):
    prefix, seqlen = 40, 97
    query, key, value = make_inputs(Case(1, 2, 1, seqlen, seqlen, 64)).operands
    options = {"enable_gqa": True, "is_causal": hidden_by != "mask"}
    if hidden_by != "is_causal":
        options["attn_mask"] = torch.ones(seqlen, seqlen, dtype=torch.bool).tril().to(device)

    def run(key, value):
        operands = _on(device, query, key, value)
        if entry == "op":
            return attention(*operands, **options)[:, :, :prefix]
        out = torch_flash_mps.attention(*operands, **options, return_lse="lse" in entry)
        return (out[0] if "lse" in entry else out)[:, :, :prefix]

    before = run(key, value)
    key[:, :, prefix:] *= 100
    value[:, :, prefix:] = 1e6
    check_same_bits(run(key, value), before)


@pytest.mark.parametrize("seqlen", [8, 9, 16, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_KF_27_fragment_layout(device, seqlen, dtype):
    out = attention(*_on(device, *eye(seqlen, 64, dtype)))
    check_exact(out, torch.eye(seqlen, 64), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "mask"),
    [*((64, mask) for mask in (None, "bool", "float", "float32")), (128, None), (256, "bool")],
)
def test_KF_28_every_dtype_on_every_path(device, dtype, head_dim, mask):
    check_case(Case(1, 1, 1, 9, 17, head_dim, dtype=dtype, mask=mask), device)


@pytest.mark.parametrize("seqlens", [(3, 8), (1, 8), (8, 3)], ids=str)
def test_DE_06_causal_is_top_left(device, seqlens):
    out = attention(*_on(device, *ramp(*seqlens)), is_causal=True)[0, 0, :, 0]
    expected = {
        (3, 8): [0, 0.5, 1],
        (1, 8): [0],
        (8, 3): [0, 0.5, 1, 1, 1, 1, 1, 1],
    }[seqlens]
    check_exact(out, torch.tensor(expected), 1e-6)


def test_PY_04_lse_is_a_natural_logarithm(device):
    _, lse = torch_flash_mps.attention(*_on(device, *ramp(1, 8)), scale=0.0, return_lse=True)
    assert lse.shape == (1, 1, 1)
    check_exact(lse, math.log(8), 1e-6)


@pytest.mark.parametrize("head_dim", [72, 100])
def test_PY_11_scale_defaults_to_the_real_head_dim(device, head_dim):
    query, key, value = make_inputs(Case(1, 1, 1, 5, 9, head_dim, 64), device).operands
    explicit = attention(query, key, value, scale=head_dim**-0.5)
    check_exact(check_attention(query, key, value), explicit, 1e-7)


@pytest.mark.parametrize("scale", [0.0, 0, 2, -0.5])
def test_PY_11_scale_is_taken_as_given(device, scale):
    query, key, value = make_inputs(Case(1, 1, 1, 5, 9, 8), device).operands
    out = check_attention(query, key, value, scale=scale)
    if scale == 0:
        check_exact(out, value.cpu().double().mean(2, keepdim=True).expand(1, 1, 5, 8), 1e-6)
