"""Dropout: the mask that the kernels compute is that of the reference, forward and backward."""

import pytest
import torch
import torch.utils.checkpoint
from cases import DTYPES
from cases import RNG_STATE as STATE
from checks import check_exact, check_same_bits
from torch import Tensor

import torch_flash_mps
from torch_flash_mps.reference import attention_ref, dropout_factors

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1.5e-1}


def inputs(place, dtype=torch.float32, batch=2, heads=(4, 2), seqlens=(40, 50), dim=32):
    shapes = [(batch, heads[0], seqlens[0], dim), *[(batch, heads[1], seqlens[1], dim)] * 2]
    return [torch.randn(shape).to(dtype).to(place).requires_grad_() for shape in shapes]


def attend(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, state: Tensor | None = STATE, **options
) -> tuple[Tensor, Tensor]:
    """Out and lse of one call with the random numbers of `state`."""
    return torch.ops.flash_mps.attention_with_lse(
        q, k, v, None, dropout_p, enable_gqa=True, rng_state=state, **options)


def test_philox_is_that_of_the_paper():
    """The known answers of Random123 for a counter and key of zeros and of ones."""
    zero = dropout_factors(torch.zeros(2, dtype=torch.int32), 1, 1, 1, 4, 0.5)
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert [factor > 0 for factor in zero.flatten().tolist()] == [w >= 2**31 for w in words]
    for bit in (2**30, 3 * 2**30):
        factors = dropout_factors(torch.zeros(2, dtype=torch.int32), 1, 1, 1, 4, bit / 2**32)
        assert [factor > 0 for factor in factors.flatten().tolist()] == [w >= bit for w in words]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout_p", [0.1, 0.7])
@pytest.mark.parametrize("seqlens", [(40, 50), (3, 70), (65, 33)], ids=str)
def test_PY_07_forward_and_backward_drop_the_same_pairs(place, dtype, dropout_p, seqlens):
    operands = inputs(place, dtype, seqlens=seqlens)
    options = {"is_causal": seqlens == (40, 50), "sinks": torch.randn(4)}
    on_place = options | {"sinks": options["sinks"].to(place)}
    out, lse = attend(*operands, dropout_p, **on_place)
    reference = [x.detach().cpu().double().requires_grad_() for x in operands]
    expected, expected_lse = attention_ref(
        *reference, dropout_p=dropout_p, rng_state=STATE, **options)
    check_exact(out, expected.detach(), TOLERANCE[dtype])
    check_exact(lse, expected_lse.detach(), 2e-5)
    grad_out = torch.randn(out.shape).to(dtype)
    grads = torch.autograd.grad(out, operands, grad_out.to(place))
    for got, ref in zip(grads, torch.autograd.grad(expected, reference, grad_out.double()),
                        strict=True):
        check_exact(got, ref, TOLERANCE[dtype] * (1 + ref.abs().max().item()))


@pytest.mark.parametrize("family", ["apple7", "apple9"])
def test_every_path_in_checked_mode(device, checked, on_family, family):
    """Staged and direct tiles, and the gradient of a float mask."""
    if not on_family(family):
        return
    operands = inputs(device, seqlens=(37, 45), dim=64)
    bias = torch.randn(1, 4, 37, 45, device=device, requires_grad=True)
    out, _ = torch.ops.flash_mps.attention_with_lse(
        *operands, bias, 0.4, enable_gqa=True, rng_state=STATE)
    leaves = [*operands, bias]
    reference = [x.detach().cpu().double().requires_grad_() for x in leaves]
    expected, _ = attention_ref(
        *reference[:3], attn_mask=reference[3], dropout_p=0.4, rng_state=STATE)
    check_exact(out, expected.detach(), 5e-6)
    grads = torch.autograd.grad(out.square().sum(), leaves)
    expected_grads = torch.autograd.grad(expected.square().sum(), reference)
    for got, ref in zip(grads, expected_grads, strict=True):
        check_exact(got, ref, 1e-4)


def test_PY_07_seed_repeats_and_calls_differ(place):
    operands = inputs(place)

    def run():
        return torch_flash_mps.attention(*operands, dropout_p=0.5, enable_gqa=True)

    torch.manual_seed(7)
    first, second = run(), run()
    torch.manual_seed(7)
    check_same_bits(run().detach(), first.detach())
    assert not torch.equal(first, second)


def test_PY_07_extremes(place):
    q, k, v = inputs(place)
    nothing, lse = attend(q, k, v, 1.0)
    assert torch.all(nothing == 0)
    check_same_bits(lse.detach(), attend(q, k, v, 0.0)[1].detach())
    for gradient in torch.autograd.grad(nothing.sum(), (q, k, v)):
        assert torch.all(gradient == 0)
    check_same_bits(attend(q, k, v, 0.0)[0].detach(), attend(q, k, v, 0.0, state=None)[0].detach())
    for wrong in (-0.1, 1.1):
        with pytest.raises(RuntimeError, match="expected dropout_p between 0 and 1"):
            attend(q, k, v, wrong)


def test_PY_07_rate_and_independence(place):
    """V = 1 and equal scores: out is the kept share over 1 - p; rows and heads differ."""
    q, k = (torch.zeros(1, 8, n, 8, device=place) for n in (64, 4096))
    out = torch_flash_mps.attention(q, k, torch.ones_like(k), dropout_p=0.5)[..., 0]
    assert abs(out.mean().item() - 1) < 0.005
    # 512 rows of 4096 coins: the standard deviation of a row is 1 / 64.
    assert 0.9 / 64 < out.std().item() < 1.1 / 64
    factors = dropout_factors(STATE, 2, 4, 16, 512, 0.5).flatten(0, 2) - 1
    correlation = factors @ factors.T / 512
    correlation.fill_diagonal_(0)
    assert correlation.abs().max() < 0.3 and correlation.mean().abs() < 0.01


def test_checkpointing_replays_the_mask(place):
    q, k, v = inputs(place)

    def block(x):
        return torch_flash_mps.attention(x, k, v, dropout_p=0.5, enable_gqa=True)

    results = []
    for run in (block, lambda x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)):
        torch.manual_seed(3)
        results.append(torch.autograd.grad(run(q).square().sum(), q)[0])
    check_same_bits(*results)


def test_a_backward_without_its_random_numbers_is_an_error(place):
    q, k, v = (x.detach() for x in inputs(place))
    out, lse = attend(q, k, v, 0.5)
    with pytest.raises(RuntimeError, match="expected the rng_state of the forward call"):
        torch.ops.flash_mps.attention_backward(
            out, None, q, k, v, out, lse, None, 0.5, False, scale=None, enable_gqa=True,
            window_left=-1, window_right=-1, softcap=0.0, alibi_slopes=None, sinks=None,
            is_bottom_right=False, rng_state=None, output_mask=[True] * 3 + [False] * 2)
    with pytest.raises(RuntimeError, match=r"expected rng_state of dtype Int and shape \[2\]"):
        attend(q, k, v, 0.5, state=STATE.long())


def test_explain_draws_no_random_numbers(place):
    q, k, v = inputs(place)
    before = torch.get_rng_state()
    torch_flash_mps.explain(q, k, v, dropout_p=0.5, enable_gqa=True)
    assert torch.equal(torch.get_rng_state(), before)
