"""rotary_embedding against float64, and quantize_kv within its bound."""

import pytest
import torch
from cases import DTYPE_NAMES, DTYPES, poisoned
from checks import check_exact, check_same_bits
from kv_model import Rotation, angles, rotated

from torch_flash_mps import quantize_kv

ops = torch.ops.flash_mps


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES.get)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("advancing", [True, False])
def test_rotary_against_float64(place, dtype, interleaved, advancing):
    batch, seqlen, heads = 2, 5, 3
    for head_dim, rotary_dim in ((64, 64), (72, 16), (20, 6)):
        x = torch.randn(batch, heads, seqlen, head_dim).to(dtype)
        rotation = Rotation(*(t.to(dtype) for t in angles(40, rotary_dim)), interleaved)
        seqlens, leftpad = [3, 21], [5, 1]
        got = ops.rotary_embedding(
            poisoned(x, place), poisoned(rotation.cos, place), poisoned(rotation.sin, place),
            seqlens=torch.tensor(seqlens, dtype=torch.int32).to(place),
            leftpad=torch.tensor(leftpad, dtype=torch.int32).to(place), position=7,
            interleaved=interleaved, is_advancing=advancing,
        ).cpu()
        assert got.dtype == dtype
        check_same_bits(got[..., rotary_dim:], x[..., rotary_dim:])
        for b in range(batch):
            for i in range(seqlen):
                at = seqlens[b] + 7 - leftpad[b] + (i if advancing else 0)
                expected = rotated(x[b, :, i], at, rotation)
                bound = torch.finfo(dtype).eps / 2 * expected.abs() + 1e-6 * expected.abs().max()
                assert ((got[b, :, i].double() - expected).abs() <= bound).all()


def test_rotary_before_and_beyond_the_tables(place):
    cos, sin = (x.to(place) for x in angles(4, 8))
    x = torch.randn(2, 1, 6, 8)
    got = ops.rotary_embedding(x.to(place), cos, sin,
                               seqlens=torch.tensor([-3, 1], dtype=torch.int32).to(place)).cpu()
    check_same_bits(got[0, :, :3], x[0, :, :3])
    assert torch.isfinite(got[0]).all() and torch.isfinite(got[1, :, :3]).all()
    assert torch.isnan(got[1, :, 3:]).all()
    with pytest.raises(RuntimeError, match="rotary_embedding: expected .* at least 6 rows, got 4"):
        ops.rotary_embedding(x.to(place), cos, sin)


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "strided"])
def test_rotary_result_lies_like_its_operand(place, layout):
    x = torch.randn(2, 3, 5, 16).to(place)
    if layout == "bshd":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "strided":
        x = torch.randn(2, 3, 16, 5).to(place).transpose(2, 3)
    cos, sin = (t.to(place) for t in angles(8, 16))
    result = torch.library.opcheck(ops.rotary_embedding.default, (x, cos, sin))
    assert set(result.values()) == {"SUCCESS"}
    got = ops.rotary_embedding(x, cos, sin)
    assert (got.stride(1) < got.stride(2)) == (layout == "bshd") and got.stride(3) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES.get)
def test_quantize_kv_keeps_its_bound(place, dtype):
    x = torch.randn(3, 7, 2, 40).mul(torch.logspace(-4, 4, 7).reshape(7, 1, 1)).to(dtype)
    x[0, 0] = 0.0
    integers, scale = quantize_kv(x.to(place))
    assert integers.dtype == torch.int8 and integers.shape == x.shape
    assert scale.dtype == torch.float32 and scale.shape == x.shape[:-1]
    step = scale.cpu().double().unsqueeze(-1)
    error = (integers.cpu().double() * step - x.double()).abs()
    assert (error <= step * (0.5 + 1e-5)).all()
    assert int(integers.abs().amax()) == 127 and not integers[0, 0].any() and not scale[0, 0].any()


def test_quantize_kv_of_no_number_is_no_number(place):
    x = torch.ones(4, 8)
    x[0, 3], x[1, 3], x[2] = torch.nan, torch.inf, 1e-38
    integers, scale = (t.cpu() for t in quantize_kv(x.to(place)))
    multiplied = integers * scale.unsqueeze(-1)
    assert torch.isnan(multiplied[:2]).all()
    check_exact(multiplied[2:], torch.tensor([[0.0], [1.0]]).expand(2, 8), 1e-6)
