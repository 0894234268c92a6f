"""Windows, softcap and ALiBi of the flash_attn functions, and under torch.compile."""

import pytest
import torch
from cases import DTYPE_NAMES, DTYPES, Case, make_inputs
from checks import check, check_exact
from gradients import attend, case_options
from test_compile import compile_with, counter  # noqa: F401, a fixture

from torch_flash_mps.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_with_kvcache,
)
from torch_flash_mps.reference import attention_ref

SCORES = [
    {"window_size": (4, 0)},
    {"window_size": (1, 3), "causal": True},
    {"window_size": (-1, 2), "softcap": 1.5},
    {"alibi_slopes": "heads", "causal": True},
    {"window_size": (6, 6), "softcap": 0.5, "alibi_slopes": "batch", "causal": True},
]


def reference_options(place, options, batch, heads):
    """The given options with their slopes on the device, and the same in the oracle's words."""
    given, meant = dict(options), {"is_causal": options.get("causal", False)}
    left, right = options.get("window_size", (-1, -1))
    meant |= {"window_left": left, "window_right": right, "softcap": options.get("softcap", 0.0)}
    if "alibi_slopes" in options:
        slopes = torch.rand((heads,) if options["alibi_slopes"] == "heads" else (batch, heads))
        given["alibi_slopes"], meant["alibi_slopes"] = slopes.to(place), slopes
    return given, meant


@pytest.mark.parametrize("options", SCORES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES.get)
@pytest.mark.parametrize("seqlens", [(23, 40), (40, 23), (3, 40)], ids=str)
def test_functions(place, options, dtype, seqlens):
    """Bottom-right, packed or not, against the oracle; gradients too."""
    given, meant = reference_options(place, options, 2, 4)
    meant["causal_offset"] = seqlens[1] - seqlens[0]
    operands = [torch.randn(2, n, heads, 24).to(dtype)
                for n, heads in zip((seqlens[0], seqlens[1], seqlens[1]), (4, 2, 2), strict=True)]
    grad_out = torch.randn(2, seqlens[0], 4, 24).to(dtype)

    def reference(dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in operands]
        out, lse = attention_ref(*(x.transpose(1, 2) for x in leaves), dtype=dtype, **meant)
        out = out.transpose(1, 2)
        return out.detach(), lse.detach(), torch.autograd.grad(out, leaves, grad_out.to(dtype))

    ref, ref_lse, expected = reference(torch.float64)
    lowp, _, plain = reference(dtype)
    leaves = [x.detach().to(place).requires_grad_() for x in operands]
    out, lse, _ = flash_attn_func(*leaves, return_attn_probs=True, **given)
    check(out, ref, lowp)
    check_exact(lse, ref_lse, 2e-5)
    for got, one, low in zip(torch.autograd.grad(out, leaves, grad_out.to(place)), expected, plain,
                             strict=True):
        check(got, one, low, dtype=dtype)
    q, k, v = (x.detach() for x in leaves)
    check(flash_attn_kvpacked_func(q, torch.stack((k, v), 2), **given), ref, lowp)
    cached = flash_attn_with_kvcache(q, k, v, **given)
    check(cached, ref, lowp)


@pytest.mark.parametrize("options", SCORES, ids=str)
def test_qkvpacked(place, options):
    given, meant = reference_options(place, options, 2, 3)
    qkv = torch.randn(2, 29, 3, 3, 16)
    ref, _ = attention_ref(*qkv.transpose(1, 3).unbind(2), **meant)
    check_exact(flash_attn_qkvpacked_func(qkv.to(place), **given), ref.transpose(1, 2), 2e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_IN_03_a_window_without_a_right_end_and_causal_are_one(place, causal):
    """window (3, 0) and window (3, -1) with causal: each token sees itself and three before."""
    q, k, v = (torch.randn(1, 10, 2, 8).to(place) for _ in range(3))
    _, lse, _ = flash_attn_func(q * 0, k, v, causal=causal, return_attn_probs=True,
                                window_size=(3, -1 if causal else 0))
    check_exact(lse[0, 0].exp(), torch.tensor([1.0, 2, 3, *[4] * 7]), 1e-5)


def test_PY_09_compiled_backward_equals_eager(place, counter):  # noqa: F811
    """Five gradients, one graph for all lengths."""
    def loss(q, k, v, mask, sinks, slopes):
        out, lse = attend(q, k, v, mask, sinks, alibi_slopes=slopes, softcap=2.0, window_left=9,
                          window_right=3)
        return (out.float() * 2).square().sum() + lse.sum()

    compiled, compilations = compile_with(loss, counter), []
    for seqlen in (17, 40, 9):
        case = Case(2, 4, 2, seqlen, seqlen, 24, mask="float_heads", alibi="heads", sinks=True)
        inputs = make_inputs(case, place)
        slopes = case_options(case, place)["alibi_slopes"]
        results = []
        for function in (loss, compiled):
            leaves = [x.detach().requires_grad_() for x in
                      (*inputs.operands, inputs.attn_mask, inputs.score_options["sinks"])]
            function(*leaves, slopes).backward()
            results.append([x.grad for x in leaves])
        assert len(results[0]) == 5
        for one, other in zip(*results, strict=True):
            # As in test_compile.py: few queries run another kernel when compiled.
            rounding = 0.0 if seqlen > 16 else 2e-6 * one.abs().max().item()
            check_exact(one, other, 1e-5 + rounding)
            assert one.any()
        compilations.append(counter.frame_count)
    assert compilations[0] == compilations[-1] <= 2


def test_compiled_autograd(place):
    compiler = torch.compile(backend="aot_eager", fullgraph=True)
    case = Case(1, 2, 2, 17, 17, 16, mask="float_heads", softcap=2.0, alibi="heads", sinks=True,
                window=(5, 2))
    inputs = make_inputs(case, place)
    leaves = [x.detach().requires_grad_() for x in
              (*inputs.operands, inputs.attn_mask, inputs.score_options["sinks"])]
    out, lse = attend(*leaves, **case_options(case, place))
    loss = out.square().sum() + lse.square().sum()
    expected = torch.autograd.grad(loss, leaves, retain_graph=True)
    with torch._dynamo.compiled_autograd._enable(compiler):
        loss.backward()
    for leaf, gradient in zip(leaves, expected, strict=True):
        check_exact(leaf.grad, gradient, 1e-6)
