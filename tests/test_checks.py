"""The judge itself: a result that is wrong in any way must not pass."""

import math

import pytest
import torch
from checks import (
    FLOOR,
    attention_and_lse_lowp,
    attention_lowp,
    check,
    check_exact,
    check_same_bits,
)

from torch_flash_mps.reference import attention_ref

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def _example(dtype):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 16, generator=generator).to(dtype) for _ in range(3))
    ref, _ = attention_ref(q, k, v)
    return ref, attention_lowp(q, k, v)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rounded_oracle_passes(dtype):
    ref, lowp = _example(dtype)
    check(ref.to(dtype), ref, lowp)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1.0])
def test_one_bad_element_fails_and_is_named(dtype, bad):
    ref, lowp = _example(dtype)
    got = ref.to(dtype)
    got[0, 1, 3, 5] = bad
    with pytest.raises(AssertionError, match=r"bad-case.*\(0, 1, 3, 5\)"):
        check(got, ref, lowp, case_id="bad-case")


def test_a_missing_nan_fails():
    ref, lowp = _example(torch.float32)
    got = ref.float()
    ref[0, 0, 0, 0] = math.nan
    with pytest.raises(AssertionError, match="NaN"):
        check(got, ref, lowp)


def test_inf_of_the_other_sign_fails():
    ref, lowp = _example(torch.float32)
    got = ref.float()
    ref[0, 0, 0, 0], got[0, 0, 0, 0] = math.inf, -math.inf
    with pytest.raises(AssertionError, match="inf"):
        check(got, ref, lowp)


def test_an_overflowed_baseline_does_not_widen_the_bound():
    ref, lowp = _example(torch.float16)
    got = ref.half() + 0.1
    lowp[:] = math.inf
    with pytest.raises(AssertionError, match="exceeds"):
        check(got, ref, lowp)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bound_is_the_floor_of_the_dtype_without_a_baseline(dtype):
    ref = torch.zeros(3, dtype=torch.float64)
    check(torch.full((3,), 0.9 * FLOOR[dtype]).to(dtype), ref)
    with pytest.raises(AssertionError, match="exceeds"):
        check(torch.full((3,), 1.1 * FLOOR[dtype]).to(dtype), ref)


def test_another_shape_fails():
    with pytest.raises(AssertionError, match="shape"):
        check(torch.zeros(1, 2), torch.zeros(2, 1))


def test_check_exact():
    check_exact(torch.tensor([2.5, 2.5]), 2.5)
    with pytest.raises(AssertionError, match="expected 2.5, got 2.75"):
        check_exact(torch.tensor([2.5, 2.75]), 2.5)


def test_check_same_bits_sees_the_sign_of_zero():
    check_same_bits(torch.tensor([math.nan, 0.0]), torch.tensor([math.nan, 0.0]))
    with pytest.raises(AssertionError, match="bytes differ"):
        check_same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_lowp_baseline_follows_the_oracle():
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(1, 4, 5, 8, generator=generator)
    k, v = (torch.randn(1, 2, 7, 8, generator=generator) for _ in range(2))
    mask = torch.rand(5, 7, generator=generator) < 0.5
    mask[2] = False
    both, bias = {"attn_mask": mask, "is_causal": True}, {"attn_mask": mask.float(), "scale": 2}
    scores = {"softcap": 0.7, "alibi_slopes": torch.rand(1, 4), "sinks": torch.randn(4)}
    band = {"window_left": 2, "window_right": 1, "causal_offset": 3, "attn_mask": mask}
    for options in (both, bias, scores | bias, band, scores | band, {"window_left": 0}):
        ref, ref_lse = attention_ref(q, k, v, **options)
        out, lse = attention_and_lse_lowp(q, k, v, **options)
        check_exact(out, ref, 1e-5)
        check_exact(lse, ref_lse, 1e-5)
