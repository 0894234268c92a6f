"""How functions become programs: what is traced again, what is refused, the ops underneath."""

import gc
import weakref

import pytest
import torch
from checks import check_same_bits
from error_calls import check_raised, run_calls
from torch.nn.attention.flex_attention import and_masks, create_block_mask

from torch_flash_mps import flex_attention
from torch_flash_mps.flex import cache
from torch_flash_mps.flex.cache import program_of
from torch_flash_mps.flex.program import make_program

CPU = torch.device("cpu")
SCALE = 2.0


@pytest.fixture
def traced(monkeypatch):
    """A list that gets one entry for each program that is made."""
    made = []

    def count(*functions):
        made.append(functions)
        return make_program(*functions)

    monkeypatch.setattr(cache, "make_program", count)
    return made


def window(width):
    return lambda b, h, q, k: q - k < width


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.ones(3))
        self.settings = {"gain": 2.0}

    def score_mod(self, score, b, h, q, k):
        return score * self.settings["gain"] + self.bias[h]


def test_a_function_is_traced_once(traced):
    table = torch.ones(4)

    def score_mod(score, b, h, q, k):
        return score * SCALE + table[h]

    layer = Layer()
    for _ in range(3):
        program_of(score_mod, window(3), CPU)
        program_of(layer.score_mod, None, CPU)
        program_of(None, and_masks(window(3), window(5)), CPU)
        table += 1   # values may change
    assert len(traced) == 3


def test_a_function_that_reaches_something_else_is_traced_again(traced, monkeypatch):
    table = torch.ones(4)

    def score_mod(score, b, h, q, k, factor=1.0):
        return score * SCALE * factor + table[h]

    def constant():
        return program_of(score_mod, None, CPU).code

    first = constant()
    table = torch.ones(5)
    assert program_of(score_mod, None, CPU).captured == (table,)
    assert constant() == first and len(traced) == 2   # of another tensor, the same text
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert constant() != first
    score_mod.__defaults__ = (4.0,)
    constant()
    layer = Layer()
    program_of(layer.score_mod, None, CPU)
    layer.settings["gain"] = 3.0
    program_of(layer.score_mod, None, CPU)
    layer.half()
    program_of(layer.score_mod, None, CPU)
    layer.bias = torch.nn.Parameter(torch.ones(3))
    program_of(layer.score_mod, None, CPU)
    program_of(None, window(3), CPU)
    program_of(None, window(4), CPU)
    assert len(traced) == 10


def test_captured_tensors_are_not_kept_alive():
    def run():
        table = torch.ones(4)
        program_of(lambda score, b, h, q, k: score + table[h], None, CPU)
        return weakref.ref(table)

    gone = run()
    gc.collect()
    assert gone() is None


def test_the_text_knows_no_size_stride_or_value():
    def text(table):
        return make_program(lambda s, b, h, q, k: s + table[h, q], None, CPU).code

    assert text(torch.ones(2, 3)) == text(torch.zeros(9, 7).t())


NAMES = """
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
flex = torch_flash_mps.flex_attention
Q, K = t(2, 4, 40, 8), t(2, 4, 50, 8)
def causal(b, h, q, k):
    return q >= k
def block_mask(q_len=40, kv_len=50, B=1, H=1, device="mps", size=32, mask=causal):
    return create_block_mask(mask, B, H, q_len, kv_len, device=device, BLOCK_SIZE=size)
T = t(4, 6)
WITH_ZERO = torch.zeros(0, 3, device="mps")
"""

# id: (call, exception, what its text says, in this order).
CALLS = {
    "sin": (
        "flex(Q, K, K, lambda s, b, h, q, k: torch.sin(s))", "NotImplementedError",
        ["flex_attention: score_mod uses the operator aten.sin, which is not supported"]),
    "sort": (
        "flex(Q, K, K, lambda s, b, h, q, k: s + T.sort()[0][h, q])", "NotImplementedError",
        ["score_mod uses the operator aten.sort"]),
    "in-place": (
        "flex(Q, K, K, lambda s, b, h, q, k: s.add_(q))", "NotImplementedError",
        ["score_mod uses the operator aten.add_.Tensor on other than a scalar of its own"]),
    "integer-power": (
        "flex(Q, K, K, lambda s, b, h, q, k: s + q ** k)", "NotImplementedError",
        ["aten.pow.Tensor_Tensor of integers with a tensor as exponent"]),
    "of-the-mask": (
        "flex(Q, K, K, None, block_mask(mask=lambda b, h, q, k: torch.sin(q.float()) > 0))",
        "NotImplementedError", ["mask_mod uses the operator aten.sin"]),
    "python-if": (
        "flex(Q, K, K, lambda s, b, h, q, k: s if q > 3 else s + 1)", "NotImplementedError",
        ["score_mod uses the operator aten._local_scalar_dense", "torch.where"]),
    "value-of-a-captured-tensor": (
        "flex(Q, K, K, lambda s, b, h, q, k, c=torch.tensor(2.0): s * float(c))",
        "NotImplementedError", ["score_mod uses the operator aten._local_scalar_dense"]),
    "list-of-a-captured-tensor": (
        "flex(Q, K, K, lambda s, b, h, q, k, c=torch.ones(2): s * c.tolist()[1])",
        "NotImplementedError", ["score_mod uses the operator aten._local_scalar_dense"]),
    "whole-tensor": (
        "flex(Q, K, K, lambda s, b, h, q, k: s + T[h])", "NotImplementedError",
        ["expected score_mod to index a captured tensor of shape (4, 6) down to one element",
         "1 dimensions left"]),
    "whole-tensor-arithmetic": (
        "flex(Q, K, K, lambda s, b, h, q, k: s + (T * 2)[h, q])", "NotImplementedError",
        ["expected score_mod to index a captured tensor of shape (4, 6)"]),
    "slice": (
        "flex(Q, K, K, lambda s, b, h, q, k: s + T[h, 1:][q])", "NotImplementedError",
        ["expected captured tensors to be indexed by b, h", "slice(1"]),
    "float64": (
        "flex(Q, K, K, lambda s, b, h, q, k: s + torch.zeros((), dtype=torch.float64))",
        "NotImplementedError", ["float64"]),
    "captured-uint8": (
        "flex(Q, K, K, lambda s, b, h, q, k, c=T.byte(): s + c[h, q])", "NotImplementedError",
        ["expected captured tensors of dtype float32, float16", "uint8", "(4, 6)"]),
    "captured-on-cpu": (
        "flex(Q, K, K, lambda s, b, h, q, k, c=T.cpu(): s + c[h, q])", "ValueError",
        ["expected captured tensors on the device of query, mps:0", "(4, 6) on cpu"]),
    "captured-empty": (
        "flex(Q, K, K, lambda s, b, h, q, k: s + WITH_ZERO[h, q])", "ValueError",
        ["expected captured tensors with elements", "(0, 3)"]),
    "eleven-captured": (
        "(c := [t(4) for _ in range(11)]) and "
        "flex(Q, K, K, lambda s, b, h, q, k, c=c: s + sum(x[h] for x in c))",
        "NotImplementedError", ["at most 10 tensors, got 11"]),
    "no-tensor": (
        "flex(Q, K, K, lambda s, b, h, q, k: 1.0)", "TypeError",
        ["expected score_mod to return a tensor, got float"]),
    "mask-of-floats": (
        "flex(Q, K, K, None, BlockMask.from_kv_blocks(block_mask().kv_num_blocks, "
        "block_mask().kv_indices, BLOCK_SIZE=32, mask_mod=lambda b, h, q, k: q * 1.0, "
        "seq_lengths=(40, 50)))", "TypeError",
        ["expected mask_mod to return a bool tensor, got torch.float32"]),
    "wrong-arguments": (
        "flex(Q, K, K, lambda s, b: s)", "TypeError", ["positional argument"]),
    "block-mask-too-short": (
        "flex(Q, K, K, None, block_mask(30))", "ValueError",
        ["expected a block_mask that was created for q_len=40 and kv_len=50, got one for 30"]),
    "block-mask-too-long": (
        "flex(Q, K, K, None, block_mask(40, 60))", "ValueError", ["kv_len=50", "40 and 60"]),
    "block-mask-of-another-batch": (
        "flex(Q, K, K, None, block_mask(B=3))", "ValueError",
        ["expected a block_mask of batch and heads 1 or those of query, (2, 4), got (3, 1)"]),
    "block-mask-on-cpu": (
        "flex(Q, K, K, None, block_mask(device='cpu'))", "RuntimeError",
        ["expected block_mask on the device of query, mps:0, got cpu"]),
    "block-mask-of-16": (
        "flex(Q, K, K, None, block_mask(size=16))", "NotImplementedError",
        ["multiples of 32, got (16, 16)"]),
    "sliced-block-mask": (
        "flex(Q[:1], K[:1], K[:1], None, block_mask(B=2)[:1])", "RuntimeError",
        ["Cannot use mask_mod from a sliced BlockMask"]),
    "forward-mode": (
        "torch.func.jvp(lambda x: flex(x, K, K), (Q,), (Q,))", "NotImplementedError",
        ["flex_attention: forward-mode differentiation is not supported"]),
    "block-mask-of-bools": (
        "flex(Q, K, K, None, torch.ones(40, 50, device='mps'))", "TypeError",
        ["expected block_mask to be a BlockMask", "got Tensor"]),
    "score-mod-of-a-number": (
        "flex(Q, K, K, 3)", "TypeError", ["expected score_mod to be a function or None, got int"]),
    "no-query": ("flex(None, K, K)", "TypeError",
                 ["expected query to be a tensor, got NoneType"]),
    "meta": ("flex(Q.to('meta'), K, K)", "ValueError",
             ["expected query on mps or cpu, got meta"]),
    "rank": ("flex(Q[0], K, K)", "NotImplementedError", ["expected query of rank 4"]),
    "dtype": ("flex(Q, K.half(), K)", "ValueError",
              ["expected key with the dtype and device of query", "float16"]),
    "float64-query": ("flex(*[t(1, 1, 2, 8, device='cpu', dtype=torch.float64)] * 3)", "ValueError",
                      ["expected query of dtype float32, float16 or bfloat16", "float64"]),
    "head-dim": ("flex(Q, t(2, 4, 50, 9), K)", "ValueError",
                 ["expected key with the head_dim of query, 8, got 9"]),
    "value": ("flex(Q, K, t(2, 4, 51, 8))", "ValueError",
              ["expected value of key's batch, heads and seqlen, (2, 4, 50), got (2, 4, 51)"]),
    "gqa": ("flex(Q, K[:, :2], K[:, :2])", "ValueError",
            ["expected enable_gqa=True", "4 and 2 heads"]),
    "heads": ("flex(Q, K[:, :3], K[:, :3], enable_gqa=True)", "ValueError",
              ["multiple of key's, got 4 and 3"]),
    "batch": ("flex(Q, K[:1], K[:1])", "ValueError", ["equal batch size", "2, 1 and None"]),
    "double-backward": (
        "flex(Q.requires_grad_(), K, K).sum().backward(create_graph=True) or "
        "Q.grad.sum().backward()", "RuntimeError",
        ["flex_attention: double backward is not supported"]),
    "vmap": ("torch.vmap(flex)(Q[None], K[None], K[None])", "NotImplementedError",
             ["flex_attention: torch.vmap is not supported"]),
    "op-with-gradient": (
        "torch.ops.flash_mps.flex_attention(Q.requires_grad_(), K, K, [], '')", "RuntimeError",
        ["flex_attention: expected query without requires_grad"]),
    "op-with-bad-code": (
        "torch.ops.flash_mps.flex_attention(Q, K, K, [], 'no Metal')", "RuntimeError",
        ["flash_mps::flex_attention: flash_fwd_", "_user", "compiling failed"]),
    "op-with-classes-that-do-not-fit": (
        "torch.ops.flash_mps.flex_attention(Q, K, K, [], '', "
        "torch.ones(1, 1, 3, 2, dtype=torch.uint8, device='mps'))", "RuntimeError",
        ["flex_attention: expected block_classes", "[2, 4, 2, 2]", "[1, 1, 3, 2]"]),
}


@pytest.fixture(scope="module")
def raised():
    calls = {name: call for name, (call, _, _) in CALLS.items()}
    return run_calls(calls | {"works": "flex(Q, K, torch.ones_like(K))"}, NAMES)


@pytest.mark.parametrize("name", CALLS)
def test_error(raised, name):
    check_raised(raised[name], CALLS[name])


def test_it_works_after_all_those_errors(raised):
    kind, text = raised["works"]
    assert kind == "nothing" and "1." in text


def arguments_of_op(device):
    table = torch.randn(2, 5, device=device)
    program = make_program(lambda s, b, h, q, k: s + table[h, (q - k) % 5], None,
                           torch.device("mps:0"))
    q = torch.randn(1, 2, 40, 8, device=device)
    k, v = torch.randn(2, 1, 1, 50, 8, device=device)
    classes = torch.ones(1, 1, 2, 2, dtype=torch.uint8, device=device)
    return (q, k, v, [table], program.code, classes), {"scale": 0.5, "enable_gqa": True}


def test_opcheck(device):
    arguments, options = arguments_of_op(device)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    op = torch.ops.flash_mps.flex_attention.default
    assert set(torch.library.opcheck(op, arguments, options, test_utils=tests).values()) == {
        "SUCCESS"}
    out, lse = op(*arguments, **options)
    op = torch.ops.flash_mps.flex_attention_backward.default
    arguments = (torch.randn_like(out), torch.randn_like(lse), out, lse, *arguments)
    result = torch.library.opcheck(op, arguments, options | {"output_mask": [True, False, True]},
                                   test_utils=tests)
    assert set(result.values()) == {"SUCCESS"}


def test_a_block_mask_is_read_again_where_it_changed(device):
    q = torch.randn(1, 1, 70, 8, device=device)
    mask = create_block_mask(window(100), 1, 1, 70, 70, device="mps", BLOCK_SIZE=32)
    whole = flex_attention(q, q, q, None, mask)
    check_same_bits(flex_attention(q, q, q, None, mask), whole)
    mask.full_kv_num_blocks.fill_(1)
    narrower = flex_attention(q, q, q, None, mask)
    assert not torch.equal(narrower, whole)
