"""The op under torch.compile: one graph for all lengths, forward and backward."""

import sys

import pytest
import torch
import torch._dynamo.compiled_autograd
import torch._dynamo.testing
import torch.utils.checkpoint
from cases import Case, make_inputs
from checks import check_exact, check_same_bits
from decoding import ENTRIES, decode

import torch_flash_mps

BACKEND = "inductor" if sys.platform == "darwin" else "aot_eager"


@pytest.fixture
def counter():
    """The backend, which counts the graphs it compiles."""
    torch._dynamo.reset()
    return torch._dynamo.testing.CompileCounterWithBackend(BACKEND)


def compile_with(function, counter):
    return torch.compile(function, fullgraph=True, dynamic=True, backend=counter)


@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize("grouped", [False, True])
def test_PY_09_compiled_equals_eager_for_every_length(place, counter, mask, grouped):
    def attend(q, k, v, mask):
        return torch.ops.flash_mps.attention(q, k, v, mask, scale=0.2, enable_gqa=grouped) * 2

    compiled = compile_with(attend, counter)
    for seqlen_q, seqlen_k in ((17, 33), (40, 65), (9, 21)):
        case = Case(2, 4, 2 if grouped else 4, seqlen_q, seqlen_k, mask=mask)
        inputs = make_inputs(case, place)
        arguments = (*inputs.operands, inputs.attn_mask)
        check_exact(compiled(*arguments), attend(*arguments))
    assert counter.frame_count == 1


@pytest.mark.parametrize("layout", ["sliced", "bshd"])
@pytest.mark.parametrize("mask", [None, "bool", "float_heads"])
@pytest.mark.parametrize("grouped", [False, True])
def test_PY_09_compiled_backward_equals_eager(place, counter, mask, grouped, layout):
    def loss(q, k, v, mask):
        out, lse = torch_flash_mps.attention(
            q, k, v, attn_mask=mask, is_causal=True, enable_gqa=grouped, return_lse=True)
        return (out.float() * 2).square().sum() + lse.sum()

    compiled, compilations = compile_with(loss, counter), []
    for seqlen in (17, 40, 9):
        case = Case(2, 4, 2 if grouped else 4, seqlen, seqlen, 24, mask=mask, layout=layout)
        inputs = make_inputs(case, place)
        gradients = []
        for function in (loss, compiled):
            leaves = [x.detach().requires_grad_() for x in inputs.operands]
            given = inputs.attn_mask
            if mask == "float_heads":
                given = given.detach().requires_grad_()
                leaves.append(given)
            function(*leaves[:3], given).backward()
            gradients.append([x.grad for x in leaves])
        for one, other in zip(*gradients, strict=True):
            # A compiled graph does not say that a gradient is wanted: few queries run flash_decode.
            rounding = 0.0 if seqlen > 16 else 2e-6 * one.abs().max().item()
            check_exact(one, other, 1e-5 + rounding)
            assert one.stride() == other.stride()
        compilations.append(counter.frame_count)
    # Dynamo starts anew once when it has met the float options; after that, no length compiles.
    assert compilations[0] == compilations[-1] <= 2


def test_PY_09_compiled_function_with_lse(place, counter):
    def attend(q, k, v):
        return torch_flash_mps.attention(q, k, v, is_causal=True, return_lse=True)

    operands = make_inputs(Case(1, 2, 2, 20, 20), place).operands
    for one, other in zip(compile_with(attend, counter)(*operands), attend(*operands),
                          strict=True):
        check_exact(one, other)


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES.keys())
def test_PY_09_decode_steps_compile_once(place, counter, entry):
    def step(q, k, v):
        out, lse = decode(entry, q * 2, k, v)
        return out + 1, lse

    compiled, compilations = compile_with(step, counter), []
    q, k, v = make_inputs(Case(1, 4, 2, 2, 300, layout="aligned"), place).operands
    for seqlen_k in (40, 41, 130, 300):
        operands = q, k[:, :, :seqlen_k], v[:, :, :seqlen_k]
        for one, other in zip(compiled(*operands), step(*operands), strict=True):
            check_exact(one, other)
        compilations.append(counter.frame_count)
    # Dynamo starts anew once when it has met the float options of the function.
    assert compilations[1] == compilations[-1] <= (2 if entry is None else 1)


def test_compiled_autocast(place, counter):
    def attend(q, k, v):
        with torch.autocast(place.type, torch.bfloat16):
            return torch_flash_mps.attention(q, k, v)

    operands = [x.detach().requires_grad_()
                for x in make_inputs(Case(1, 2, 2, 20, 20), place).operands]
    compiled = compile_with(attend, counter)
    out = compiled(*operands)
    assert out.dtype == torch.bfloat16
    gradients = torch.autograd.grad(out.float().sum(), operands)
    expected = torch.autograd.grad(attend(*operands).float().sum(), operands)
    for one, other in zip(gradients, expected, strict=True):
        check_exact(one, other)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_autograd(place, dynamic, return_lse):
    compiler = torch.compile(backend=BACKEND, fullgraph=True, dynamic=dynamic)
    for seqlen in (9, 17):
        inputs = make_inputs(Case(1, 2, 2, seqlen, seqlen, 16, mask="float_heads"), place)
        leaves = [x.detach().requires_grad_() for x in (*inputs.operands, inputs.attn_mask)]
        results = torch_flash_mps.attention(
            *leaves[:3], attn_mask=leaves[3], is_causal=True, return_lse=return_lse)
        loss = sum(x.square().sum() for x in (results if return_lse else [results]))
        expected = torch.autograd.grad(loss, leaves, retain_graph=True)
        with torch._dynamo.compiled_autograd._enable(compiler, dynamic=dynamic):
            loss.backward()
        for leaf, gradient in zip(leaves, expected, strict=True):
            check_exact(leaf.grad, gradient)


def test_compiled_checkpointing_replays_dropout(place, counter):
    def attend(q, k, v):
        return torch_flash_mps.attention(q, k, v, dropout_p=0.5)

    def checkpointed(*operands):
        return torch.utils.checkpoint.checkpoint(attend, *operands, use_reentrant=False)

    operands = make_inputs(Case(1, 2, 2, 20, 33), place).operands
    results = []
    for function in (attend, compile_with(checkpointed, counter)):
        torch.manual_seed(3)
        leaves = [x.detach().requires_grad_() for x in operands]
        results.append(torch.autograd.grad(function(*leaves).square().sum(), leaves))
    for got, expected in zip(*results, strict=True):
        check_same_bits(got, expected)
