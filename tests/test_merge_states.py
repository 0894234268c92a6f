"""merge_states: attention over all keys from attention over parts of them."""

import itertools
import math

import pytest
import torch
from cases import DTYPES, Case, make_inputs
from checks import attention_lowp, check, check_exact

import torch_flash_mps
from torch_flash_mps import merge_states
from torch_flash_mps.reference import attention_ref


def state(q, k, v, **options):
    return torch_flash_mps.attention(q, k, v, return_lse=True, **options)


@pytest.mark.parametrize("where", ["mps", "cpu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_the_keys_merge_to_the_whole(device, where, dtype):
    case = Case(2, 4, 4, 9, 50, 24, dtype=dtype)
    q, k, v = make_inputs(case, device if where == "mps" else "cpu").operands
    bounds = (0, 1, 17, 50)
    parts = [state(q, k[:, :, a:b], v[:, :, a:b]) for a, b in itertools.pairwise(bounds)]
    left = merge_states(*merge_states(*parts[0], *parts[1]), *parts[2])
    right = merge_states(*parts[0], *merge_states(*parts[1], *parts[2]))
    ref, ref_lse = attention_ref(q, k, v)
    for out, lse in (left, right):
        assert out.dtype == dtype and lse.dtype == torch.float32
        check(out, ref, attention_lowp(q, k, v))
        check_exact(lse, ref_lse, 2e-5)


def test_PY_04_two_keys_and_six_keys():
    q, k = torch.zeros(1, 1, 3, 8), torch.ones(1, 1, 8, 8)
    v = torch.tensor([1.0] * 2 + [5.0] * 6).reshape(1, 1, 8, 1)
    few, many = state(q, k[:, :, :2], v[:, :, :2]), state(q, k[:, :, 2:], v[:, :, 2:])
    out, lse = merge_states(*few, *many)
    check_exact(out, 4.0, 1e-6)
    check_exact(lse, math.log(8), 1e-6)


def test_an_empty_state_changes_nothing():
    q, k, v = make_inputs(Case(1, 2, 2, 5, 7, 8)).operands
    full = state(q, k, v)
    empty = state(q, k[:, :, :0], v[:, :, :0])
    for merged in (merge_states(*full, *empty), merge_states(*empty, *full)):
        check_exact(merged[0], full[0])
        check_exact(merged[1], full[1])
    out, lse = merge_states(*empty, *empty)
    check_exact(out, 0.0)
    assert (lse == -math.inf).all()


def test_large_sums_do_not_overflow():
    q = torch.full((1, 1, 2, 4), 100.0)
    v = torch.tensor([1.0, 3.0]).reshape(1, 1, 2, 1)
    first, rest = state(q, q[:, :, :1], v[:, :, :1]), state(q, q[:, :, 1:], v[:, :, 1:])
    out, lse = merge_states(*first, *rest)
    check_exact(out, 2.0, 1e-6)
    check_exact(lse, 20000 + math.log(2), 1e-2)


def test_gradients_flow_through_out_and_lse():
    inputs = make_inputs(Case(1, 2, 2, 6, 11, 8))
    hidden = torch.ones(6, 11, dtype=torch.bool)
    hidden[0], hidden[1, :4], hidden[2, 4:] = False, False, False   # empty: both, one, the other
    grad_out, grad_lse = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6)

    def whole(q, k, v):
        return attention_ref(q, k, v, attn_mask=hidden)

    def merged(q, k, v):
        parts = [state(q, k[:, :, part], v[:, :, part], attn_mask=hidden[:, part].contiguous())
                 for part in (slice(0, 4), slice(4, 11))]
        return merge_states(*parts[0], *parts[1])

    def gradients(function):
        operands = [x.detach().requires_grad_() for x in inputs.operands]
        out, lse = function(*operands)
        return torch.autograd.grad([out, lse], operands, [grad_out.to(out), grad_lse.to(lse)])

    for got, ref in zip(gradients(merged), gradients(whole), strict=True):
        check_exact(got, ref, 1e-5)


def test_shapes_that_do_not_fit_are_named():
    out, lse = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)
    with pytest.raises(ValueError, match=r"merge_states: expected .* got .*\(1, 3, 2\)"):
        merge_states(out, lse, out, lse.transpose(1, 2))
    with pytest.raises(ValueError, match=r"\(1, 2, 3, 5\)"):
        merge_states(out, lse, torch.zeros(1, 2, 3, 5), lse)
