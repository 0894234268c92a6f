"""Few query rows on inputs whose result needs no random numbers, and on hostile values."""

import math

import pytest
import torch
from cases import DTYPES, Case, make_inputs, ramp
from checks import check_exact, check_same_bits
from decoding import ENTRIES, MAX_ROWS, causal_offset, check_decode, decode

from torch_flash_mps.reference import visible_pairs

NAN = math.nan
INF = math.inf
ROWS = (1, 3, MAX_ROWS)


@pytest.fixture(params=ENTRIES.values(), ids=ENTRIES.keys())
def entry(request) -> int | None:
    return request.param


def _on(device, *tensors):
    return [x.to(device) for x in tensors]


def _hidden(kind, visible):
    return {
        "bool": visible,
        "-inf": torch.where(visible, 0.0, -INF),
        "lowest": torch.where(visible, 0.0, torch.finfo(torch.float32).min),
        "-1e4": torch.where(visible, 0.0, -1e4),
    }[kind]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", ["bool", "-inf"])
def test_DE_05_splits_without_a_visible_key(device, entry, kind, rows):
    query, key, value = _on(device, *ramp(rows, 4096))
    keys = torch.arange(4096)
    for visible, expected in ((keys == 5, 5.0), (keys == 4095, 4095.0), (keys < 0, 0.0)):
        mask = _hidden(kind, visible).reshape(1, 1, 1, -1).to(device)
        out, lse = decode(entry, query, key, value, attn_mask=mask, scale=0.0)
        check_exact(out, expected)
        check_exact(lse, 0.0 if visible.any() else -INF, 1e-6)


def test_DE_05_each_row_sees_another_split(device, entry):
    query, key, value = _on(device, *ramp(MAX_ROWS, 4096))
    seen = torch.arange(MAX_ROWS) * 256 + 7
    visible = torch.arange(4096) == seen[:, None]
    visible[3] = False
    for kind in ("bool", "-inf"):
        out, lse = decode(entry, query, key, value, attn_mask=_hidden(kind, visible).to(device),
                          scale=0.0)
        check_exact(out[0, 0, :, 0], torch.where(torch.arange(MAX_ROWS) == 3, 0, seen))
        assert torch.isneginf(lse[0, 0]).tolist() == [row == 3 for row in range(MAX_ROWS)]


@pytest.mark.parametrize("seqlens", [(1, 8), (3, 8), (8, 3), (16, 5), (1, 700), (16, 700)], ids=str)
def test_DE_06_causal_alignment(device, entry, seqlens):
    visible = visible_pairs(*seqlens, is_causal=True, causal_offset=causal_offset(entry, *seqlens))
    keys = visible.sum(1)
    out, lse = decode(entry, *_on(device, *ramp(*seqlens)), is_causal=True, scale=0.0)
    check_exact(out[0, 0, :, 0], (keys - 1).clamp(min=0) / 2, 1e-4)
    check_exact(lse[0, 0], torch.log(keys), 1e-5)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("position", [0, 4, 15, 30, 31, 32])
def test_DE_10_garbage_beyond_the_position(device, entry, position, rows):
    query, key, value = make_inputs(Case(2, 4, 2, rows, 64, 64)).operands
    key[:, :, position + 1 :] = 1e3 * query[:, ::2, :1]
    value[:, :, position + 1 :] = 1e6
    operands = _on(device, query, key, value)
    used = [operands[0], *(x[:, :, : position + 1] for x in operands[1:])]
    for kind in ("bool", "-inf"):
        mask = _hidden(kind, torch.arange(64) <= position).reshape(1, 1, 1, 64).to(device)
        for got, expected in zip(decode(entry, *operands, attn_mask=mask), decode(entry, *used),
                                 strict=True):
            check_exact(got, expected, 2e-6)


@pytest.mark.parametrize("kind", ["bool", "-1e4"])
@pytest.mark.parametrize("seqlen_k", [32832, 65600])
def test_KF_04_only_the_last_of_many_keys(device, entry, seqlen_k, kind):
    query, key, value = ramp(2, seqlen_k)
    value = (value - (seqlen_k - 64)).clamp(min=0)
    mask = _hidden(kind, torch.arange(seqlen_k) >= seqlen_k - 64).reshape(1, 1, 1, -1)
    out, _ = decode(entry, *_on(device, query, key * 0, value), attn_mask=mask.to(device))
    check_exact(out, 31.5, 1e-4)


def test_KF_05_mask_rows_beyond_2_to_the_31(device, entry):
    # Left uninitialised and hardly touched: 4 GiB of addresses.
    torch.utils.deterministic.fill_uninitialized_memory = False
    mask = torch.empty(MAX_ROWS, 2**28, dtype=torch.bool, device=device)[:, :64]
    mask.copy_(torch.arange(64) == 3 * torch.arange(MAX_ROWS)[:, None])
    out, _ = decode(entry, *_on(device, *ramp(MAX_ROWS, 64)), attn_mask=mask)
    check_exact(out[0, 0, :, 0], 3 * torch.arange(MAX_ROWS))


@pytest.mark.parametrize("kind", ["bool", "-inf", "lowest", "-1e4"])
@pytest.mark.parametrize(
    ("first", "last", "expected"), [(128, 440, 284.0), (440, 440, 440.0), (0, 0, 0.0)]
)
def test_KF_07_first_tiles_hidden(device, entry, kind, first, last, expected):
    keys = torch.arange(441)
    mask = _hidden(kind, (keys >= first) & (keys <= last)).reshape(1, 1, 1, 441)
    for rows in ROWS:
        out, _ = decode(entry, *_on(device, *ramp(rows, 441)), attn_mask=mask.to(device))
        check_exact(out, expected, 1e-4)


@pytest.mark.parametrize("kind", ["bool", "-inf"])
@pytest.mark.parametrize("rows", [2, 8, 9, 16])
def test_KF_08_rows_without_a_key_are_zero(device, entry, kind, rows):
    visible = torch.zeros(rows, 65, dtype=torch.bool)
    visible[: rows // 2, : rows // 2] = True
    operands = make_inputs(Case(1, 4, 2, rows, 65, 8), device).operands
    out, lse = check_decode(entry, *operands, attn_mask=_hidden(kind, visible).to(device))
    assert not out[:, :, rows // 2 :].any()
    out, lse = decode(entry, *operands, attn_mask=_hidden(kind, visible & False).to(device))
    assert not out.any()
    assert (lse == -INF).all()


@pytest.mark.parametrize("seqlen_k", [5, 300])
def test_KF_08_a_finite_mask_never_means_no_key(device, entry, seqlen_k):
    for lowest in (torch.finfo(torch.float32).min, -1e30):
        mask = torch.full((1, 1, 1, seqlen_k), lowest, device=device)
        out, _ = decode(entry, *_on(device, *ramp(3, seqlen_k)), attn_mask=mask)
        check_exact(out, (seqlen_k - 1) / 2, 1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 4, 9, 16])
def test_KF_09_nan_in_a_query_stays_in_its_row(device, entry, dtype, rows):
    query, key, value = make_inputs(Case(1, 2, 1, rows, 40, 64, dtype=dtype)).operands
    query[0, 1, rows // 2, 0] = NAN
    out, _ = check_decode(entry, *_on(device, query, key, value))
    assert torch.isnan(out[0, 1, rows // 2]).all()
    assert torch.isnan(out).sum() == 64


@pytest.mark.parametrize("operand", ["key", "value"])
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("seqlen", [4, 33, 130])
def test_KF_10_a_key_that_nobody_sees_gives_nothing(device, entry, operand, bad, seqlen):
    for hidden in {0, seqlen // 2, seqlen - 1}:
        query, key, value = ramp(3, seqlen)
        (key if operand == "key" else value)[:, :, hidden] = bad
        expected = (seqlen * (seqlen - 1) / 2 - hidden) / (seqlen - 1)
        for kind in ("bool", "-inf"):
            mask = _hidden(kind, torch.arange(seqlen) != hidden).reshape(1, 1, 1, seqlen)
            out, _ = decode(entry, *_on(device, query, key, value), attn_mask=mask.to(device))
            check_exact(out, expected, 1e-4)


@pytest.mark.parametrize("seqlen", [4, 33, 130])
def test_KF_10_nan_in_a_key_stays_with_the_rows_that_see_it(device, entry, seqlen):
    query, key, value = ramp(4, seqlen)
    key[:, :, 3 if entry is None else seqlen - 1] = NAN
    operands = _on(device, query, key, value)
    out = decode(entry, *operands, is_causal=True)[0][0, 0, :, 0].cpu()
    keys = torch.arange(4.0) + 1 + causal_offset(entry, 4, seqlen)
    check_exact(out[:-1], (keys[:-1] - 1) / 2, 1e-4)
    assert torch.isnan(out[-1])


@pytest.mark.parametrize("seqlen_k", [6, 70])
def test_KF_13_products_beyond_float16(device, entry, seqlen_k):
    query = torch.full((1, 1, 4, 128), 128.0, dtype=torch.float16)
    _, _, value = ramp(4, seqlen_k, 128, dtype=torch.float16)
    key = torch.full_like(value, 128.0)
    out, _ = decode(entry, *_on(device, query, key, value))
    check_exact(out, (seqlen_k - 1) / 2)


@pytest.mark.parametrize("rows", ROWS)
def test_KF_14_scale_is_not_folded_into_query(device, entry, rows):
    query, key, value = ramp(rows, 4, dtype=torch.float16)
    out, _ = decode(entry, *_on(device, query + 30000, key * 0, value), scale=4.0)
    check_exact(out, 1.5)
    query, key, value = make_inputs(Case(1, 2, 1, rows, 40, 8), device).operands
    for scale in (0.0, -0.7):
        check_decode(entry, query, key, value, scale=scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_KF_15_sums_beyond_float16(device, entry, dtype):
    for seqlen_k, size in ((4, 60000.0), (4096, 60000.0), (70000, 1.0)):
        value = torch.full((1, 1, seqlen_k, 8), size).to(dtype)
        query = torch.zeros(1, 1, 2, 8, dtype=dtype)
        out, _ = decode(entry, *_on(device, query, torch.zeros_like(value), value))
        check_exact(out, value[0, 0, 0, 0])


def test_KF_17_causal_mask_and_causal_flag_together(device, entry):
    for rows in range(1, MAX_ROWS + 1):
        for seqlen_k in (rows, 5, 70):
            operands = make_inputs(Case(1, 1, 1, rows, seqlen_k, 8), device, seed=rows).operands
            mask = visible_pairs(rows, seqlen_k, is_causal=True).to(device)
            check_decode(entry, *operands, attn_mask=mask, is_causal=True, case_id=str(rows))


@pytest.mark.parametrize("rows", ROWS)
def test_KF_18_query_heads_read_their_own_kv_head(device, entry, rows):
    query = torch.zeros(1, 6, rows, 8)
    value = torch.arange(2.0).reshape(1, 2, 1, 1).expand(1, 2, 30, 8).contiguous()
    out, _ = decode(entry, *_on(device, query, value * 0, value))
    check_exact(out, torch.tensor([0.0, 0, 0, 1, 1, 1])[:, None, None], 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_KF_20_every_head_batch_and_row_under_causal(device, entry, dtype):
    query, key, value = (x.expand(2, 4, -1, -1).clone() for x in ramp(16, 16, 32))
    value += 100 * torch.arange(4).reshape(1, 4, 1, 1) + 1000 * torch.arange(2).reshape(2, 1, 1, 1)
    out, _ = decode(entry, *(x.to(device, dtype) for x in (query, key, value)), is_causal=True)
    expected = value[..., :1, :].double() + torch.arange(16.0).reshape(16, 1) / 2
    # float16 counts in whole numbers between 1024 and 2048.
    check_exact(out, expected, 1e-3 if dtype == torch.float32 else 1.0)


@pytest.mark.parametrize("rows", [1, 8, 16])
@pytest.mark.parametrize("true", [1, 2, 255])
def test_KF_21_any_nonzero_byte_is_true(device, entry, rows, true):
    operands = make_inputs(Case(1, 1, 1, rows, 512, 64), device).operands
    mask = torch.full((rows, 512), true, dtype=torch.uint8, device=device).view(torch.bool)
    for got, expected in zip(decode(entry, *operands, attn_mask=mask), decode(entry, *operands),
                             strict=True):
        check_exact(got, expected, 1e-6)


def test_KF_22_one_key_and_a_number_for_each_head(device, entry):
    x = make_inputs(Case(1, 8, 8, 1, 1, 64), device).query
    mask = torch.tensor([3.5, 0.453, 3.19, 0.97, -5.47, 5.19, 2.16, 0.54]).reshape(1, 8, 1, 1)
    out, _ = decode(entry, x, x, x, attn_mask=mask.to(device), scale=1.0)
    check_same_bits(out, x)


@pytest.mark.parametrize("hidden_by", ["is_causal", "mask", "both"])
def test_KF_26_the_future_never_changes_the_past(device, entry, hidden_by):
    rows, seqlen = 9, 97
    query, key, value = make_inputs(Case(1, 2, 1, rows, seqlen, 64)).operands
    offset = causal_offset(entry, rows, seqlen)
    options = {"is_causal": hidden_by != "mask"}
    if hidden_by != "is_causal":
        options["attn_mask"] = visible_pairs(
            rows, seqlen, is_causal=True, causal_offset=offset).to(device)
    before = decode(entry, *_on(device, query, key, value), **options)
    for past in reversed(range(1, rows)):
        key[:, :, past + offset :] = 100.0
        value[:, :, past + offset :] = 1e6
        after = decode(entry, *_on(device, query, key, value), **options)
        for one, other in zip(after, before, strict=True):
            check_same_bits(one[:, :, :past], other[:, :, :past])


@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize("rows", ROWS)
def test_PY_04_lse_is_a_natural_logarithm(device, entry, rows, group_size):
    query, key, value = ramp(rows, 8)
    operands = _on(device, query.expand(1, group_size, rows, 8), key, value)
    _, lse = decode(entry, *operands, scale=0.0)
    assert lse.shape == (1, group_size, rows)
    check_exact(lse, math.log(8), 1e-6)
