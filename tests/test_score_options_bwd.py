"""Gradients with windows, softcap, ALiBi and sinks: anchors, and cases against float64 autograd."""

import math

import pytest
import torch
from cases import DTYPE_NAMES, DTYPES, SCORED, Case
from checks import check, check_exact, check_same_bits
from gradients import (
    attend,
    case_operands,
    case_options,
    check_case_gradients,
    check_gradients,
    gradients,
    output_gradients,
    sinks_slack,
)
from test_score_options import EVERYTHING

from torch_flash_mps.reference import attention_ref, visible_pairs

INF = math.inf
WITH_LSE = torch.ops.flash_mps.attention_with_lse


def column(*numbers):
    """[1, 1, S, 1]"""
    return torch.tensor(numbers, dtype=torch.float32)[None, None, :, None]


def operands_on(place, q, k, v, mask=None, sinks=None):
    named = {"query": q, "key": k, "value": v, "attn_mask": mask}
    if sinks is not None:
        named["sinks"] = sinks
    return {name: None if x is None else x.to(place) for name, x in named.items()}


def test_BW_08_gradient_of_a_sink(place):
    operands = operands_on(place, torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 3, 1),
                           column(3.0, 3.0, 3.0), sinks=torch.zeros(1))
    grads = check_gradients(operands, torch.ones(1, 1, 1, 1).to(place))
    check_exact(grads["sinks"], -0.5625, 1e-6)
    check_exact(grads["value"], 0.25, 1e-6)


def test_BW_09_derivative_of_softcap(place):
    operands = operands_on(place, column(1.0), column(1.0, 0.0), column(1.0, 0.0))
    grads = check_gradients(operands, torch.ones(1, 1, 1, 1).to(place), softcap=1.0, scale=1.0)
    check_exact(grads["query"].flatten(), torch.tensor([0.091128]), 1e-6)
    check_exact(grads["key"].flatten(), torch.tensor([0.091128, -0.216985]), 1e-6)
    check_exact(grads["value"].flatten(), torch.tensor([0.681700, 0.318300]), 1e-6)


def test_BW_09_the_mask_is_added_after_the_cap(place):
    """So its gradient is that of the capped score, without the derivative of the cap."""
    operands = operands_on(place, column(1.0), column(1.0, 0.0), column(1.0, 0.0),
                           torch.zeros(1, 2))
    grads = check_gradients(operands, torch.ones(1, 1, 1, 1).to(place), softcap=1.0, scale=1.0)
    check_exact(grads["attn_mask"].flatten(), torch.tensor([0.216985, -0.216985]), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES.get)
def test_BW_09_a_saturated_cap_has_no_gradient(place, dtype):
    """Scores of 40 caps: tanh is 1, its derivative 0, also where the product overflows float16."""
    operands = operands_on(place, *(x.to(dtype) for x in (column(400.0, 400.0), column(200.0, 0.0),
                                                          column(1.0, 0.0))))
    grads = check_gradients(operands, torch.ones(1, 1, 2, 1).to(place, dtype), softcap=2.0,
                            scale=1.0)
    check_exact(grads["key"][0, 0, 0], 0.0)
    assert grads["key"][0, 0, 1].abs() > 1


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES.get)
def test_BW_08_sinks_of_any_size(place, dtype):
    q, k, v = (torch.randn(2, 6, n, 16).to(dtype) for n in (20, 33, 33))
    sinks = torch.tensor([0.0, -INF, 80.0, -80.0, 3.0, 11.0])
    for sink_dtype in {dtype, torch.float32}:
        for is_causal in (False, True):
            grads = check_gradients(
                operands_on(place, q, k[:, :2], v[:, :2], sinks=sinks.to(sink_dtype)),
                torch.randn(2, 6, 20, 16).to(place, dtype), torch.randn(2, 6, 20).to(place),
                is_causal=is_causal)
            check_exact(grads["sinks"][1], 0.0)
            check_exact(grads["query"][:, 2], 0.0, 1e-6)


@pytest.mark.parametrize("seqlen_k", [0, 5])
def test_BW_05_rows_that_see_no_key(place, seqlen_k):
    """With a sink, lse is that sink: its gradient is that of lse. All others are 0."""
    q, k = torch.randn(2, 3, 18, 8), torch.randn(2, 3, seqlen_k, 8)
    mask = torch.zeros(18, seqlen_k, dtype=torch.bool)
    grad_out, grad_lse = torch.randn(2, 3, 18, 8).to(place), torch.randn(2, 3, 18).to(place)
    sinks = torch.tensor([0.0, -INF, 80.0])
    for given_mask in ((mask,) if seqlen_k else (None, mask)):
        grads = gradients(attend, operands_on(place, q, k, k, given_mask, sinks), grad_out,
                          grad_lse)
        for name in ("query", "key", "value"):
            check_exact(grads[name], 0.0)
        expected = grad_lse.cpu().double().sum((0, 2))
        expected[1] = 0.0
        check_exact(grads["sinks"], expected, 1e-5)
    window = {"window_left": 2, "window_right": 0, "softcap": 3.0}
    grads = check_gradients(operands_on(place, q, k, k), grad_out, **window)
    check_exact(grads["query"][:, :, seqlen_k + 2:], 0.0)


@pytest.mark.parametrize("place_name", ["mps", "cpu"])
@pytest.mark.parametrize("case", SCORED, ids=lambda case: case.id)
def test_cases(device, place_name, case):
    check_case_gradients(case, torch.device(place_name), through_lse=True)


@pytest.mark.parametrize("seqlens", [(33, 70), (70, 33), (1, 40)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES.get)
def test_bottom_right(place, dtype, seqlens):
    """As the functions of flash_attn call the op."""
    case = Case(2, 4, 2, *seqlens, 24, dtype=dtype, causal=True, window=(9, -1), softcap=1.0,
                alibi="batch", sinks=True)
    operands, grads = case_operands(case, place), output_gradients(case, place)
    options = case_options(case, place)
    offset = case.seqlen_k - case.seqlen_q

    def op(q, k, v, mask, sinks):
        return WITH_LSE(q, k, v, mask, sinks=sinks, enable_gqa=True, is_bottom_right=True,
                        **options)

    def reference(q, k, v, mask, sinks, dtype=torch.float64):
        return attention_ref(q, k, v, attn_mask=mask, sinks=sinks, causal_offset=offset,
                             dtype=dtype, **options)

    got = gradients(op, operands, *grads)
    expected = gradients(reference, operands, *grads, torch.float64)
    plain = gradients(lambda *x: reference(*x, dtype=dtype), operands, *grads, dtype)
    for name, gradient in got.items():
        check(gradient, expected[name], plain[name], dtype=dtype, case_id=f"{case.id}, {name}",
              slack=sinks_slack(grads[0]) if name == "sinks" else 0.0)


@pytest.mark.parametrize("family", ["apple7", "apple9"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES.get)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_checked_and_shuffled(device, checked, on_family, family, dtype, head_dim):
    if on_family(family):
        mask = "float" if head_dim == 64 else "bool"
        case = Case(1, 2, 1, 19, 36, head_dim, dtype=dtype, mask=mask, **EVERYTHING)
        check_case_gradients(case, device, through_lse=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES.get)
def test_pairs_outside_the_windows_are_not_read(place, dtype):
    """NaN in keys and queries that have no pair in the window changes no bit of any gradient."""
    seqlen_q, seqlen_k = 100, 130
    window = {"window_left": 5, "window_right": 3}
    visible = visible_pairs(seqlen_q, seqlen_k, **window)
    visible[:40] = False   # and the mask hides the first queries from everything
    options = window | {"softcap": 2.0, "alibi_slopes": torch.tensor([0.25, 0.5]).to(place)}
    q, k, v = (torch.randn(1, 2, n, 24).to(dtype) for n in (seqlen_q, seqlen_k, seqlen_k))
    grad_out = torch.randn(1, 2, seqlen_q, 24).to(dtype)
    results = []
    for poison in (0.0, math.nan, INF):
        rows, keys = ~visible.any(1)[:, None], ~visible.any(0)[:, None]
        assert rows.any() and keys.any()
        operands = operands_on(place, q.masked_fill(rows, poison), k.masked_fill(keys, poison),
                               v.masked_fill(keys, poison), visible[:, :1])
        results.append(gradients(lambda *x: attend(*x, **options), operands,
                                 grad_out.masked_fill(rows, poison).to(place)))
    for result in results[1:]:
        for name, clean in results[0].items():
            assert torch.isfinite(clean).all()
            check_same_bits(result[name], clean, name)
    check_exact(results[0]["key"][0, :, ~visible.any(0)], 0.0)


def test_BW_10_the_same_bits_in_every_order_of_threads(device, simulator):
    case = Case(1, 4, 2, 70, 70, 64, dtype=torch.float16, mask="float", **EVERYTHING)
    operands, grads = case_operands(case, device), output_gradients(case, device)
    options = case_options(case, device)

    def run():
        return gradients(lambda *x: attend(*x, **options), operands, *grads)

    first = run()
    assert list(first) == ["query", "key", "value", "attn_mask", "sinks"]
    try:
        for order in range(6):
            if simulator is not None:
                simulator.shuffle(order)
            for name, gradient in run().items():
                check_same_bits(gradient, first[name], name)
    finally:
        if simulator is not None:
            simulator.shuffle(None)


def test_only_the_gradient_of_sinks(place):
    """The other operands are constants, as when a model trains its sinks alone."""
    q, k, v = (torch.randn(2, 4, 19, 16).to(place) for _ in range(3))
    sinks = torch.randn(4).to(place).requires_grad_()
    out, lse = attend(q, k, v, None, sinks, is_causal=True)
    (got,) = torch.autograd.grad(out.sum() + lse.sum(), sinks)
    exact = sinks.detach().cpu().double().requires_grad_()
    ref, ref_lse = attention_ref(q, k, v, sinks=exact, is_causal=True)
    check_exact(got, torch.autograd.grad(ref.sum() + ref_lse.sum(), exact)[0], 2e-5)
    assert got.shape == (4,) and got.dtype == torch.float32


@pytest.mark.parametrize("packed", [False, True])
def test_PY_08_slopes_and_sinks_of_any_dtype_under_autocast(place, packed):
    q, k, v = torch.randn(3, 1, 2, 9, 8).to(place)
    slopes, sinks = torch.rand(2).half().to(place), torch.randn(2).half().to(place)

    def run(alibi_slopes, sinks):
        options = {"alibi_slopes": alibi_slopes, "sinks": sinks}
        if not packed:
            return torch.ops.flash_mps.attention(q, k, v, **options)
        ends = torch.tensor([0, 9], dtype=torch.int32, device=place)
        rows = (x[0].transpose(0, 1) for x in (q, k, v))
        return torch.ops.flash_mps.attention_varlen(*rows, ends, ends, 9, 9, **options)

    with torch.autocast(place.type, torch.bfloat16):
        leaf = sinks.detach().requires_grad_()
        out, expected = run(slopes, leaf), run(slopes.float(), sinks.float())
    check_same_bits(out.detach(), expected)
    assert torch.autograd.grad(out.sum(), leaf)[0].dtype == torch.float16
