"""Gradients of the op on both kinds of tensors: against the oracle, by anchors, of empty sizes."""

import math

import pytest
import torch
from cases import DTYPES, GQA, LAYOUT, MASKED, SMOKE, Case, eye, ramp
from checks import check_exact, check_same_bits
from gradients import attend, case_operands, check_case_gradients, check_gradients, gradients
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_flash_fwd_host import EMPTY, RANKS

from torch_flash_mps.reference import attention_ref


def on(place, *tensors):
    return [x.to(place) for x in tensors]


def operands_of(q, k, v, mask=None):
    return {"query": q, "key": k, "value": v, "attn_mask": mask}


@pytest.mark.parametrize("case", SMOKE + GQA + MASKED + LAYOUT, ids=lambda case: case.id)
def test_gradients(place, case):
    check_case_gradients(case, place)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", GQA[:3] + MASKED[-4:], ids=lambda case: case.id)
def test_gradients_through_lse(place, case, dtype):
    options = {**case.__dict__, "dtype": dtype}
    check_case_gradients(Case(**options), place, through_lse=True)


def test_gradient_of_lse_alone(place):
    q, k, v = on(place, *(torch.randn(1, 2, 5, 8) for _ in range(3)))
    q.requires_grad_()
    _, lse = attend(q, k, v, None)
    scores = (q.detach().cpu().double() @ k.cpu().double().transpose(-1, -2)) / math.sqrt(8)
    expected = torch.softmax(scores, -1) @ k.cpu().double() / math.sqrt(8)
    check_exact(torch.autograd.grad(lse.sum(), q)[0], expected, 1e-6)


def test_BW_04_closed_forms(place):
    value = torch.arange(4.0).reshape(1, 1, 4, 1)
    ones = torch.ones(1, 1, 4, 1)
    operands = operands_of(*on(place, torch.zeros(1, 1, 4, 4), torch.eye(4)[None, None], value))
    grads = check_gradients(operands, ones.to(place), scale=1.0)
    check_exact(grads["query"], torch.tensor([-0.375, -0.125, 0.125, 0.375]).expand(1, 1, 4, 4),
                1e-6)
    operands = operands_of(*on(place, torch.ones(1, 1, 2, 1), torch.zeros(1, 1, 4, 1), value))
    grads = check_gradients(operands, ones[:, :, :2].to(place), scale=1.0)
    check_exact(grads["key"].flatten(), torch.tensor([-0.75, -0.25, 0.25, 0.75]), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_BW_05_rows_without_a_key(place, dtype):
    bottom_right = torch.ones(8, 3, dtype=torch.bool).tril(3 - 8)
    for mask in (torch.tensor([[False, False], [True, True]]), bottom_right):
        seqlen_q, seqlen_k = mask.shape
        q = torch.randn(1, 1, seqlen_q, 4).to(dtype)
        k, v = (torch.randn(1, 1, seqlen_k, 4).to(dtype) for _ in range(2))
        empty = ~mask.any(1)
        for as_mask in (mask, torch.zeros(mask.shape).masked_fill(~mask, -math.inf).to(dtype)):
            operands = operands_of(*on(place, q, k, v, as_mask))
            grads = check_gradients(operands, torch.ones_like(q).to(place))
            check_exact(grads["query"][:, :, empty], 0.0)
            check_exact(grads["value"].float().sum(), float((~empty).sum() * 4), 0.05)


@pytest.mark.parametrize("seqlen", [1, 2, 63, 64, 65, 100, 127, 129])
def test_BW_06_lengths_beside_a_tile(place, seqlen):
    for causal in (False, True):
        case = Case(2, 3, 3, seqlen, seqlen, 16, causal=causal)
        check_case_gradients(case, place)


def test_BW_07_mask_gradient_is_summed_over_its_broadcast(place):
    q, k = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 4, 4)
    v = torch.arange(4.0).reshape(1, 1, 4, 1).expand(1, 2, 4, 1)
    operands = operands_of(*on(place, q, k, v, torch.zeros(1, 1, 1, 4)))
    grads = check_gradients(operands, torch.ones(1, 2, 3, 1).to(place))
    check_exact(grads["attn_mask"].flatten(), torch.tensor([-2.25, -0.75, 0.75, 2.25]), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 9, 21), (2, 1, 9, 21), (2, 1, 1, 21), (1, 4, 9, 1), (9, 1),
                                   (1, 21), (2, 4, 1, 1), (1, 1, 1, 1), (9, 21)])
def test_BW_07_every_broadcast_of_a_mask(place, dtype, shape):
    operands = case_operands(Case(2, 4, 2, 9, 21, 16, dtype=dtype), place)
    for mask_dtype in {dtype, torch.float32}:
        operands["attn_mask"] = torch.randn(shape).to(place, mask_dtype)
        check_gradients(operands, torch.randn(2, 4, 9, 16).to(place, dtype), case_id=str(shape))


@pytest.mark.parametrize("name", RANKS)
def test_HD_16_other_ranks_and_broadcasting(place, name):
    q, k, v = on(place, *(torch.randn(shape) for shape in RANKS[name]))
    leading = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    grad_out = torch.randn(*leading, q.shape[-2], v.shape[-1]).to(place)
    shapes = [(q.shape[-2], k.shape[-2]), (*leading, 1, k.shape[-2])]
    for mask in (None, *(torch.randn(shape) for shape in shapes)):
        operands = operands_of(q, k, v, None if mask is None else mask.to(place))
        check_gradients(operands, grad_out, case_id=name)


@pytest.mark.parametrize("through_lse", [False, True])
@pytest.mark.parametrize("name", EMPTY)
def test_HD_09_empty_sizes_have_gradients_of_the_inputs_shape(place, name, through_lse):
    q, k, v = on(place, *(torch.ones(shape) for shape in EMPTY[name]))
    mask = torch.zeros(q.shape[2], k.shape[2]).to(place)
    grad_out = torch.ones(*q.shape[:-1], v.shape[-1]).to(place)
    grad_lse = torch.ones(q.shape[:-1]).to(place) if through_lse and k.shape[2] else None
    operands = operands_of(q, k, v, mask)
    grads = check_gradients(operands, grad_out, grad_lse, case_id=name)
    for operand, grad in grads.items():
        assert grad.shape == operands[operand].shape
        if "=0" in name and not name.startswith("D"):
            check_exact(grad, 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_key_that_no_query_sees_gets_0_whatever_it_holds(place, dtype):
    mask = torch.rand(6, 9) < 0.8
    mask[:, :2], mask[0], mask[3, 2] = True, False, True
    mask[:, 5] = False
    q, k, v = (torch.randn(2, 4, n, 16).to(dtype) for n in (6, 9, 9))
    grad_out, grad_lse = torch.randn(2, 4, 6, 16).to(dtype), torch.randn(2, 4, 6)
    clean = gradients(attend, operands_of(*on(place, q, k, v, mask)), grad_out.to(place),
                      grad_lse.to(place))
    k[:, :, 5], v[:, :, 5] = math.nan, math.inf
    q[:, :, 0], grad_out[:, :, 0], grad_lse[:, :, 0] = math.nan, math.nan, math.nan
    dirty = gradients(attend, operands_of(*on(place, q, k, v, mask)), grad_out.to(place),
                      grad_lse.to(place))
    for name in clean:
        check_same_bits(dirty[name], clean[name], name)
    check_exact(dirty["key"][:, :, 5], 0.0)
    check_exact(dirty["value"][:, :, 5], 0.0)
    check_exact(dirty["query"][:, :, 0], 0.0)


def test_grad_out_of_any_strides(place):
    operands = case_operands(Case(2, 4, 2, 9, 21, 16), place)
    base = torch.randn(2, 9, 4, 32).to(place)
    for grad_out in (torch.ones((), device=place).expand(2, 4, 9, 16),
                     base[..., :16].transpose(1, 2), base[..., ::2].transpose(1, 2),
                     torch.randn(9, 1, 1, 16).to(place).permute(1, 2, 0, 3).expand(2, 4, 9, 16)):
        check_gradients(operands, grad_out)


def test_out_equals_value_weights(place):
    q, k, v = on(place, *eye(4, 4))
    grads = check_gradients(operands_of(q, k, v), torch.ones(1, 1, 4, 4).to(place), scale=1.0)
    check_exact(grads["value"], 1.0, 1e-6)


def test_gradient_of_a_ramp_sums_to_0(place):
    operands = operands_of(*on(place, *ramp(5, 5)))
    grads = check_gradients(operands, torch.ones(1, 1, 5, 8).to(place), is_causal=True)
    check_exact(grads["value"][0, 0, 0, 0], sum(1 / n for n in range(1, 6)), 1e-6)


@settings(max_examples=25, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_directional_derivatives(place, data):
    """<gradient, direction> against a central difference of the float64 oracle."""
    draw = data.draw
    heads_kv = draw(st.integers(1, 2))
    case = Case(
        draw(st.integers(1, 2)), heads_kv * draw(st.integers(1, 3)), heads_kv,
        draw(st.integers(1, 40)), draw(st.integers(1, 70)), draw(st.integers(1, 40)),
        draw(st.integers(1, 40)), dtype=draw(st.sampled_from(DTYPES)), causal=draw(st.booleans()),
        mask=draw(st.sampled_from([None, "bool", "float", "float_rows", "float32"])),
        layout=draw(st.sampled_from(["sliced", "bshd", "strided"])),
    )
    options = {"is_causal": case.causal}
    operands = case_operands(case, place)
    grad_out = torch.randn(case.batch, case.num_heads_q, case.seqlen_q, case.value_dim)
    grad_lse = torch.randn(grad_out.shape[:-1])
    grads = gradients(lambda *x: attend(*x, **options), operands,
                      grad_out.to(place), grad_lse.to(place))
    exact = {name: x if x is None or x.dtype == torch.bool else x.cpu().double()
             for name, x in operands.items()}
    weights = grad_out.to(case.dtype).double(), grad_lse.double()

    def value(name, step):
        moved = exact | {name: exact[name] + step}
        out, lse = attention_ref(moved["query"], moved["key"], moved["value"],
                                 attn_mask=moved["attn_mask"], **options)
        return ((out * weights[0]).sum() + (lse * weights[1]).masked_fill(lse.isinf(), 0).sum())

    for name, grad in grads.items():
        direction = torch.randn(grad.shape).double()
        expected = (value(name, 1e-5 * direction) - value(name, -1e-5 * direction)) / 2e-5
        scale = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[case.dtype]
        tolerance = scale * (1 + grad.cpu().double().norm() + math.sqrt(grad.numel()))
        check_exact((grad.cpu().double() * direction).sum(), expected, tolerance.item(),
                    case_id=f"{case.id}, {name}")
