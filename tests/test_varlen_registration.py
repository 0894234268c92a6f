"""attention_varlen as PyTorch sees it: schema, fakes, compile, autocast, modes; errors by name."""

import sys
from dataclasses import replace

import pytest
import torch
import torch._dynamo.testing
from cases import Case
from checks import check_exact, check_same_bits
from error_calls import check_raised, run_calls
from packed import Packed, make_packed
from torch.utils.checkpoint import checkpoint

import torch_flash_mps

OPS = torch.ops.flash_mps
PLAIN = Packed((5, 0, 33), (9, 4, 20), Case(1, 4, 2, head_dim=24, head_dim_v=40))
OPTIONS = {
    "plain": PLAIN,
    "bf16": replace(PLAIN, case=replace(PLAIN.case, dtype=torch.bfloat16, causal=True)),
    "scores": replace(PLAIN, is_bottom_right=True, case=replace(
        PLAIN.case, batch=3, softcap=1.5, alibi="batch", sinks=True, window=(9, 4))),
    "one-head": replace(PLAIN, case=replace(PLAIN.case, num_heads_q=1, num_heads_kv=1)),
}


@pytest.mark.parametrize("wants_gradients", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_PY_09_opcheck(place, name, wants_gradients):
    inputs = make_packed(OPTIONS[name], place)
    # opcheck compares NaN with NaN.
    leaves = {key: x.nan_to_num(0.0).requires_grad_(wants_gradients)
              for key, x in inputs.operands.items()}
    sinks = leaves.pop("sinks", None)
    tests = torch.library.opcheck.__kwdefaults__["test_utils"]
    if place.type == "mps":   # of which this one knows nothing
        tests = [one for one in tests if one != "test_autograd_registration"]
    arguments = (*leaves.values(), *inputs.cu_seqlens, *inputs.max_seqlens)
    options = inputs.options | {"sinks": sinks}
    for op in (OPS.attention_varlen.default, OPS.attention_varlen_with_lse.default):
        result = torch.library.opcheck(op, arguments, options, test_utils=tests)
        assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", OPTIONS)
def test_PY_09_opcheck_of_backward(place, name):
    inputs = make_packed(OPTIONS[name], place)
    operands = {key: x.nan_to_num(0.0) for key, x in inputs.operands.items()}
    out, lse = inputs.attend(**operands)
    sinks = operands.pop("sinks", None)
    options = {"scale": None, "window_left": -1, "window_right": -1, "softcap": 0.0,
               "alibi_slopes": None, "rng_state": None, "sinks": sinks} | inputs.options
    for wanted in ((True, True, True), (False, True, False)):
        arguments = (torch.randn_like(out), torch.randn_like(lse), *operands.values(), out, lse,
                     *inputs.cu_seqlens, *inputs.max_seqlens, 0.0, options.pop("is_causal", False))
        result = torch.library.opcheck(
            OPS.attention_varlen_backward.default, arguments,
            options | {"output_mask": [*wanted, sinks is not None]})
        assert set(result.values()) == {"SUCCESS"}


def test_PY_09_compiled_equals_eager_for_every_length(place):
    torch._dynamo.reset()
    backend = "inductor" if sys.platform == "darwin" else "aot_eager"
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)

    def loss(q, k, v, cu_q, cu_k, max_q, max_k):
        out, lse = torch_flash_mps.attention_varlen(q, k, v, cu_q, cu_k, max_q, max_k,
                                                    is_causal=True, return_lse=True)
        return (out * 2).square().sum() + lse.exp().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=counter)
    frames = set()
    # Sizes that are equal at first would be taken for the same size.
    first = replace(PLAIN, seqlens_q=(5, 0, 33, 1, 2, 3), seqlens_k=(9, 4, 20, 8, 1, 0))
    for packed in (first, replace(PLAIN, seqlens_q=(40, 2, 8, 3), seqlens_k=(40, 5, 9, 9)),
                   replace(PLAIN, seqlens_q=(3, 7), seqlens_k=(5, 70))):
        inputs, results = make_packed(packed, place), []
        for function in (loss, compiled):
            leaves = [x.nan_to_num(0.0).requires_grad_() for x in inputs.operands.values()]
            value = function(*leaves, *inputs.cu_seqlens, *inputs.max_seqlens)
            results.append([value, *torch.autograd.grad(value, leaves)])
        for got, expected in zip(*results, strict=True):
            check_exact(got, expected, 1e-4)
        frames.add(counter.frame_count)
    assert len(frames) == 1


def test_PY_08_autocast(device):
    inputs = make_packed(PLAIN, device)
    leaves = [x.detach().requires_grad_() for x in inputs.operands.values()]
    lengths = (*inputs.cu_seqlens, *inputs.max_seqlens)
    with torch.autocast("mps", torch.float16):
        out, lse = torch_flash_mps.attention_varlen(*leaves, *lengths, return_lse=True)
        assert out.dtype == torch.float16 and lse.dtype == torch.float32
        gradients = torch.autograd.grad(out.sum(), leaves)
    assert [x.dtype for x in gradients] == [torch.float32] * 3
    check_same_bits(out, torch_flash_mps.attention_varlen(*(x.half() for x in leaves), *lengths))


def test_PY_10_checkpointing_replays_dropout_and_equal_operands_add_up(place):
    x = torch.randn(20, 2, 24).to(place).requires_grad_()
    lengths = torch.tensor([0, 8, 20], dtype=torch.int32).to(place)

    def attend(x):
        return torch_flash_mps.attention_varlen(x, x, x, lengths, lengths, 12, 12, dropout_p=0.3)

    results = []
    for run in (attend, lambda x: checkpoint(attend, x, use_reentrant=False)):
        torch.manual_seed(4)
        results.append(torch.autograd.grad(run(x).square().sum(), x)[0])
    check_same_bits(*results)


def test_second_derivatives_and_slopes_are_errors(place):
    x = torch.randn(20, 2, 24).to(place).requires_grad_()
    lengths = torch.tensor([0, 8, 20], dtype=torch.int32).to(place)
    out = torch_flash_mps.attention_varlen(x, x, x, lengths, lengths, 12, 12)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="varlen_backward: double backward is not supported"):
        gradient.sum().backward()
    slopes = torch.ones(2).to(place).requires_grad_()
    with pytest.raises(NotImplementedError, match="gradient of alibi_slopes is not supported"):
        torch_flash_mps.attention_varlen(x, x, x, lengths, lengths, 12, 12, alibi_slopes=slopes)


NAMES = """
Q, K = t(6, 4, 8), t(9, 2, 8)
def cu(*numbers, dtype=torch.int32, device="mps"):
    return torch.tensor(numbers, dtype=dtype).to(device)
def varlen(q=Q, k=K, v=K, cu_q=cu(0, 2, 6), cu_k=cu(0, 5, 9), max_q=4, max_k=5, *rest, **options):
    return torch.ops.flash_mps.attention_varlen(q, k, v, cu_q, cu_k, max_q, max_k, *rest, **options)
"""
CALLS = {
    "rank": ("varlen(t(1, 6, 4, 8))", "RuntimeError", [
        "attention_varlen: expected query of rank 3 ([total_q, num_heads_q, head_dim])", "[1, 6"]),
    "heads": ("varlen(t(6, 3, 8))", "RuntimeError", [
        "attention_varlen: expected a query head count that is a multiple of key's (layout "
        "[total, H, D]), got query [6, 3, 8], key [9, 2, 8]"]),
    "head-dim": ("varlen(t(6, 4, 9))", "RuntimeError", [
        "expected key with the head_dim of query, 9", "8"]),
    "rows-of-value": ("varlen(v=t(8, 2, 8))", "RuntimeError", [
        "expected value with the seqlen of key, 9, got seqlen 8 (value [8, 2, 8])"]),
    "head-dim-too-large": ("varlen(t(6, 4, 800), t(9, 2, 800), t(9, 2, 800))", "RuntimeError", [
        "attention_varlen: expected head_dim and head_dim_v of at most", "800"]),
    "PY-14-dtype": ("varlen(cu_q=t(3))", "RuntimeError", [
        "expected cu_seqlens_q of dtype Int or Long", "Float"]),
    "PY-14-rank": ("varlen(cu_k=cu(0, 5, 9)[None])", "RuntimeError", [
        "expected cu_seqlens_k of shape [number of sequences + 1]", "[1, 3]"]),
    "PY-14-empty": ("varlen(cu_q=cu())", "RuntimeError", [
        "expected cu_seqlens_q of shape [number of sequences + 1]", "[0]"]),
    "PY-14-count": ("varlen(cu_k=cu(0, 9))", "RuntimeError", [
        "expected cu_seqlens_k of the size of cu_seqlens_q, 3", "2"]),
    "PY-14-max-seqlen": ("varlen(max_k=-1)", "RuntimeError", [
        "expected max_seqlen_q and max_seqlen_k of 0 or more", "4 and -1"]),
    "PY-14-falls": ("varlen(cu_q=cu(0, 5, 4, device='cpu'))", "RuntimeError", [
        "expected cu_seqlens_q that begins at 0 or later, never falls and ends at 6 at most",
        "4 at index 2"]),
    "PY-14-beyond": ("varlen(cu_k=cu(0, 5, 10, device='cpu'))", "RuntimeError", [
        "expected cu_seqlens_k", "ends at 9 at most", "10 at index 2"]),
    "PY-14-device": ("varlen(Q.cpu(), K.cpu(), K.cpu())", "RuntimeError", [
        "expected cu_seqlens_q on the CPU or the device of query, cpu", "mps"]),
    "slopes": ("varlen(alibi_slopes=t(3, 4))", "RuntimeError", [
        "expected alibi_slopes of shape [4] or [2, 4]", "[3, 4]"]),
    "dropout": ("varlen(dropout_p=2.0)", "RuntimeError", ["expected dropout_p between 0 and 1"]),
    "block-table": (
        "torch_flash_mps.flash_attn.flash_attn_varlen_func(Q, K, K, cu(0, 6), cu(0, 9), 6, 9, "
        "block_table=cu(1, 2)[None])", "NotImplementedError",
        ["flash_attn_varlen_func: expected no block_table", "(1, 2)", "flash_attn_with_kvcache"]),
    "qkvpacked": (
        "torch_flash_mps.flash_attn.flash_attn_varlen_qkvpacked_func(t(6, 2, 4, 8), cu(0, 6), 6)",
        "ValueError", ["expected qkv of shape [total, 3, num_heads, head_dim]", "(6, 2, 4, 8)"]),
}


@pytest.fixture(scope="module")
def raised():
    return run_calls({name: call for name, (call, *_) in CALLS.items()}, NAMES)


@pytest.mark.parametrize("name", CALLS)
def test_error_names_what_was_expected_and_found(raised, name):
    check_raised(raised[name], CALLS[name])
