"""Windows, softcap, ALiBi and sinks of the op: anchors, and cases against the float64 oracle."""

import math
from dataclasses import replace

import pytest
import torch
from cases import DTYPE_NAMES, DTYPES, SCORED, Case, make_inputs, ramp
from checks import check_exact, check_lse, check_same_bits

import torch_flash_mps
from torch_flash_mps.reference import attention_ref, visible_pairs

INF = math.inf
EVERYTHING = {"window": (20, 3), "softcap": 2.0, "alibi": "batch", "sinks": True}

# Rows from the forward kernel's and from the decode kernel's.
ROWS = pytest.mark.parametrize("rows", [1, 17], ids=["decode", "fwd"])


def attend(q, k, v, **options):
    return torch_flash_mps.attention(q, k, v, return_lse=True, **options)


def rows_of(x, count):
    """[D] -> [1, 1, count, D], the same row again and again."""
    return torch.as_tensor(x).reshape(1, 1, 1, -1).expand(1, 1, count, -1).contiguous()


def check_scored(case: Case, place: torch.device, seed: int = 0) -> None:
    inputs = make_inputs(case, place, seed)
    check_lse(*inputs.operands, **inputs.options, case_id=case.id)


@ROWS
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES.get)
def test_KF_24_softcap_comes_before_the_mask(place, dtype, rows):
    q, key = rows_of([10.0, 0.0], rows), torch.tensor([[10.0, 0.0], [0.0, 0.0]])[None, None]
    operands = [x.to(place, dtype) for x in (q, key / 10, torch.eye(2)[None, None])]
    tolerance = 2 * torch.finfo(dtype).eps
    cap = {"scale": 1.0, "softcap": 1.0}
    expected = torch.tensor([0.731059, 0.268941]).expand(1, 1, rows, 2)
    check_exact(attend(*operands, **cap)[0], expected, tolerance + 1e-6)
    check_exact(attend(*operands, scale=1.0)[0][..., 0], 1.0, 1e-3)
    hidden = torch.tensor([[False, True]])
    for mask in (hidden, torch.zeros(1, 2, dtype=dtype).masked_fill(~hidden, -INF)):
        out, lse = attend(*operands, **cap, attn_mask=mask.to(place))
        check_exact(out, torch.tensor([0.0, 1.0]).expand(1, 1, rows, 2))
        check_exact(lse, 0.0)


@ROWS
def test_KF_24_scores_beyond_the_cap(place, rows):
    q, k = rows_of([10.0], rows).to(place), torch.full((1, 1, 1, 1), 10.0).to(place)
    _, lse = attend(q, k, k, scale=1.0, softcap=50.0)
    check_exact(lse, 48.201379, 1e-5)
    for score, capped in ((1e30, 50.0), (-1e30, -50.0), (INF, 50.0)):
        _, lse = attend(q, k * score, k, scale=1.0, softcap=50.0)
        check_exact(lse, capped, 1e-5)


def test_KF_24_a_cap_of_0_is_off(place):
    q, k, v = make_inputs(Case(1, 2, 2, 20, 30), place).operands
    for got, plain in zip(attend(q, k, v, softcap=0.0), attend(q, k, v), strict=True):
        check_same_bits(got, plain)


@ROWS
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES.get)
def test_KF_25_sinks_are_in_the_denominator(place, dtype, rows):
    q, k = torch.zeros(1, 6, rows, 8), torch.ones(1, 2, 3, 8)
    operands = [x.to(place, dtype) for x in (q, k, 3 * k)]
    sinks = torch.tensor([0.0, math.log(5), -INF, 80.0, -80.0, 1e4])   # by query head
    means = torch.tensor([2.25, 1.125, 3.0, 0.0, 3.0, 0.0])
    for sink_dtype in {dtype, torch.float32}:
        typed = sinks.to(sink_dtype)
        out, lse = attend(*operands, enable_gqa=True, sinks=typed.to(place))
        check_exact(out, means[:, None, None].expand(1, 6, rows, 8),
                    4 * torch.finfo(dtype).eps)
        total = torch.log(3 + typed.double().exp())
        expected = torch.where(typed > 50, typed.double(), total)[:, None]
        check_exact(lse, expected.expand(1, 6, rows), 1e-5 + 1e-7 * 1e4)


@ROWS
@pytest.mark.parametrize("has_keys", [False, True])
def test_KF_25_a_row_that_sees_no_key(place, rows, has_keys):
    """Its sink is all there is; without one there is nothing."""
    q, k = torch.ones(1, 3, rows, 8).to(place), torch.ones(1, 3, 5 * has_keys, 8).to(place)
    mask = torch.zeros(rows, k.shape[2], dtype=torch.bool).to(place)
    sinks = torch.tensor([0.0, -INF, 80.0])
    out, lse = attend(q, k, k, attn_mask=mask, sinks=sinks.to(place))
    check_exact(out, 0.0)
    check_exact(lse, sinks[:, None].expand(1, 3, rows))
    check_exact(attend(q, k, k, attn_mask=mask)[1], -INF)


@ROWS
def test_PY_13_alibi_takes_the_distance(place, rows):
    seqlen_k = rows + 2   # is_bottom_right: the last query stands at the last key
    q, k, v = (x.to(place) for x in ramp(rows, seqlen_k, heads=2))
    slopes = torch.tensor([0.5, 2.0])
    for one in (slopes, slopes[None]):
        out, lse = torch.ops.flash_mps.attention_with_lse(
            q, k, v, alibi_slopes=one.to(place), is_bottom_right=True)
        ref, ref_lse = attention_ref(q, k, v, alibi_slopes=one, causal_offset=2)
        check_exact(out, ref, 1e-5)
        check_exact(lse, ref_lse, 1e-5)
    if rows == 1:
        check_exact(out[0, 0, 0, 0], 1.320157, 1e-6)


@ROWS
def test_PY_13_slopes_of_each_sequence(place, rows):
    q, k, v = (x.expand(3, -1, -1, -1).to(place) for x in ramp(rows, 9, heads=2))
    slopes = torch.tensor([[0.0, 0.5], [1.0, -0.25], [0.125, 2.0]]).to(place)
    out, _ = attend(q, k, v, alibi_slopes=slopes)
    for batch in range(3):
        one, _ = attend(q[:1], k[:1], v[:1], alibi_slopes=slopes[batch])
        check_same_bits(out[batch : batch + 1], one)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(10, 10), (1, 9), (3, 40), (40, 40), (70, 33)])
@pytest.mark.parametrize("left", [-1, 0, 3, 100])
@pytest.mark.parametrize("right", [-1, 0, 2])
def test_IN_03_each_token_sees_its_window(place, seqlen_q, seqlen_k, left, right):
    """IN-03: with a sliding window of 4, token i sees exactly min(i + 1, 4) keys."""
    q, k, v = (x.to(place) for x in ramp(seqlen_q, seqlen_k))
    window = {"window_left": left, "window_right": right}
    for is_causal in (False, True):
        for is_bottom_right in (False, True):
            out, lse = torch.ops.flash_mps.attention_with_lse(
                q, k, v, is_causal=is_causal, is_bottom_right=is_bottom_right, **window)
            offset = (seqlen_k - seqlen_q) * is_bottom_right
            visible = visible_pairs(seqlen_q, seqlen_k, is_causal=is_causal, causal_offset=offset,
                                    **window).double()
            count = visible.sum(1)
            means = (visible @ torch.arange(seqlen_k).double()) / count.clamp(min=1)
            check_exact(out[0, 0, :, 0], means, 2e-5)
            check_exact(lse[0, 0].exp(), count, 1e-3)
            if left == 3 and is_causal and (seqlen_q, seqlen_k) == (10, 10):
                assert lse[0, 0].exp().round().tolist() == [1, 2, 3, *[4] * 7]


@pytest.mark.parametrize("place_name", ["mps", "cpu"])
@pytest.mark.parametrize("case", SCORED, ids=lambda case: case.id)
def test_cases(device, place_name, case):
    check_scored(case, torch.device(place_name))


@pytest.mark.parametrize("family", ["apple7", "apple9"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES.get)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_checked_and_shuffled(device, checked, on_family, seed, family, dtype, head_dim):
    if not on_family(family):
        return   # a Mac has one family
    case = Case(1, 2, 1, 35, 70, head_dim, dtype=dtype, mask="bool", **EVERYTHING)
    check_scored(case, device, seed)
    check_scored(replace(case, seqlen_q=3, causal=True), device, seed)


@ROWS
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES.get)
@pytest.mark.parametrize("is_bottom_right", [False, True])
def test_keys_outside_the_windows_are_not_read(place, dtype, rows, is_bottom_right):
    """NaN there, in the same block or far away, changes no bit."""
    seqlen_k, left, right = 150, 6, 2
    q, k, v = make_inputs(Case(2, 4, 2, rows, seqlen_k, dtype=dtype), "cpu").operands
    offset = (seqlen_k - rows) * is_bottom_right
    options = {"window_left": left, "window_right": right, "is_bottom_right": is_bottom_right,
               "sinks": torch.zeros(4), "softcap": 3.0, "enable_gqa": True}
    visible = visible_pairs(rows, seqlen_k, causal_offset=offset, window_left=left,
                            window_right=right).any(0)
    results = []
    for poison in (0.0, math.nan, INF):
        operands = [q, *(x.masked_fill(~visible[:, None], poison) for x in (k, v))]
        on = {name: x.to(place) if isinstance(x, torch.Tensor) else x
              for name, x in options.items()}
        results.append(torch.ops.flash_mps.attention_with_lse(
            *(x.to(place) for x in operands), **on))
    for result in results[1:]:
        for got, clean in zip(result, results[0], strict=True):
            assert torch.isfinite(got).all()
            check_same_bits(got, clean)


@ROWS
def test_a_nan_in_a_query_stays_in_its_row(place, rows):
    case = Case(1, 2, 2, rows + 1, 40, **EVERYTHING)
    inputs = make_inputs(case, place)
    clean, _ = attend(*inputs.operands, **inputs.options)
    inputs.query[0, 0, rows] = math.nan
    out, _ = attend(*inputs.operands, **inputs.options)
    assert out[0, 0, rows].isnan().all()
    check_same_bits(out[0, 0, :rows], clean[0, 0, :rows])
    check_same_bits(out[0, 1], clean[0, 1])


@pytest.mark.parametrize("lowest", [-1e30, torch.finfo(torch.float32).min])
@ROWS
def test_a_finite_mask_is_not_no_key(place, rows, lowest):
    q, k, v = (x.to(place) for x in ramp(rows, 9))
    mask = torch.full((1, 9), lowest).to(place)
    slopes = torch.full((1,), 1e30).to(place)
    for options in ({}, {"softcap": 1.0}, {"window_left": 20}, {"alibi_slopes": slopes}):
        out, lse = attend(q, k, v, attn_mask=mask, **options)
        assert torch.isfinite(out).all() and torch.isfinite(lse).all(), options
