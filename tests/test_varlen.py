"""Packed sequences: attention_varlen, forward and backward, against each sequence alone."""

import contextlib
from dataclasses import replace

import pytest
import torch
from cases import DTYPES, Case
from checks import check_exact, check_same_bits
from packed import Packed, check_packed, make_packed

import torch_flash_mps

OPS = torch.ops.flash_mps
# Of no length, of one row, around a tile, several tiles; more keys than queries and fewer.
SEQLENS_Q = (0, 1, 5, 32, 33, 0, 70, 4, 16)
SEQLENS_K = (7, 0, 64, 31, 33, 0, 16, 90, 16)
PLAIN = Packed(SEQLENS_Q, SEQLENS_K, Case(1, 4, 2, head_dim=24, head_dim_v=40))
SCORED = replace(PLAIN, case=replace(PLAIN.case, batch=len(SEQLENS_Q), softcap=1.5, alibi="batch",
                                     sinks=True, window=(9, 4)))
CASES = [
    PLAIN,
    replace(PLAIN, case=replace(PLAIN.case, causal=True)),
    replace(PLAIN, case=replace(PLAIN.case, causal=True), is_bottom_right=True),
    replace(PLAIN, case=replace(PLAIN.case, window=(3, -1), causal=True), is_bottom_right=True),
    replace(PLAIN, case=replace(PLAIN.case, window=(2, 5))),
    SCORED,
    replace(SCORED, case=replace(SCORED.case, window=(6, 20), causal=True), is_bottom_right=True),
    *(replace(PLAIN, case=replace(PLAIN.case, dtype=dtype, causal=True), is_bottom_right=True)
      for dtype in DTYPES[1:]),
]


@pytest.mark.parametrize("packed", CASES, ids=lambda packed: packed.id)
def test_each_sequence_is_as_alone(place, checked, packed):
    check_packed(packed, place)


@pytest.mark.parametrize("family", ["apple9", "apple10"])
def test_on_other_families(checked, on_family, device, family):
    if on_family(family):
        check_packed(CASES[2], device)


def grads_of(outputs, leaves):
    generator = torch.Generator().manual_seed(2)
    grads = [torch.randn(x.shape, generator=generator).to(x) for x in outputs]
    return torch.autograd.grad(outputs, leaves, grads, retain_graph=True)


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_PY_07_equal_lengths_are_a_dense_batch_bit_by_bit(place, dropout_p):
    """Also with dropout: what a pair's random word follows from is the same."""
    dense = [torch.randn(3, 45, heads, 24).to(place).requires_grad_() for heads in (4, 2, 2)]
    options = {"dropout_p": dropout_p, "is_causal": True,
               "rng_state": torch.tensor([3, 5], dtype=torch.int32) if dropout_p else None}
    lengths = (torch.arange(4, dtype=torch.int32) * 45).to(place)
    out, lse = OPS.attention_varlen_with_lse(*(x.flatten(0, 1) for x in dense), lengths, lengths,
                                             45, 45, **options)
    other, other_lse = OPS.attention_with_lse(*(x.transpose(1, 2) for x in dense), enable_gqa=True,
                                              **options)
    pairs = [(out.unflatten(0, (3, 45)), other.transpose(1, 2)),
             (lse.unflatten(1, (3, 45)).transpose(0, 1), other_lse)]
    generator = torch.Generator().manual_seed(2)
    grads = [torch.randn(one.shape, generator=generator).to(one) for one, _ in pairs]
    both = [torch.autograd.grad(outputs, dense, grads) for outputs in zip(*pairs, strict=True)]
    for got, expected in (*pairs, *zip(*both, strict=True)):
        if place.type == "mps":
            check_same_bits(got, expected)
        else:
            check_exact(got, expected, 1e-5)


def test_PY_07_dropout_of_a_varying_rate_and_gradient(place):
    x = torch.ones(600, 2, 8).to(place).requires_grad_()
    lengths = torch.tensor([0, 100, 600], dtype=torch.int32).to(place)
    attend = torch_flash_mps.attention_varlen
    torch.manual_seed(1)
    out = attend(x, x, x, lengths, lengths, 500, 500, dropout_p=0.5)
    torch.manual_seed(1)
    check_same_bits(attend(x, x, x, lengths, lengths, 500, 500, dropout_p=0.5), out)
    assert abs(out.mean().item() - 1) < 0.02 and out.std() > 0
    check_exact(attend(x, x, x, lengths, lengths, 500, 500, dropout_p=1.0), 0.0)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    # Each weight that is kept adds to the gradient of v what it adds to out.
    check_exact(gradient.sum(), out.sum(), 1e-1)


def test_the_same_bits_on_every_run(device, simulator):
    inputs = make_packed(SCORED, device)
    runs = []
    for order in (None, 1, 2):
        if simulator is not None:
            simulator.shuffle(order)
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.operands.items()}
        outputs = inputs.attend(**leaves)
        runs.append([*outputs, *grads_of(outputs, list(leaves.values()))])
        torch.mps.synchronize()
    if simulator is not None:
        simulator.shuffle(None)
    for run in runs[1:]:
        for got, expected in zip(run, runs[0], strict=True):
            check_same_bits(got, expected)


def test_one_launch_and_the_host_waits_for_nothing(device, simulator, kernels, monkeypatch):
    # Filling new memory goes through the CPU on the simulated device.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    inputs = make_packed(PLAIN, device)
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.operands.items()}
    grad_out, grad_lse = (torch.ones_like(x) for x in inputs.attend(**leaves))
    torch.mps.synchronize()
    kernels()
    before = simulator.stats()["commits"]
    out, lse = inputs.attend(**leaves)
    OPS.attention_varlen_backward(
        grad_out, grad_lse, *leaves.values(), out, lse, *inputs.cu_seqlens, *inputs.max_seqlens,
        0.0, False, scale=None, window_left=-1, window_right=-1, softcap=0.0, alibi_slopes=None,
        sinks=None, is_bottom_right=False, rng_state=None, output_mask=[True, True, True, False])
    assert simulator.stats()["commits"] == before
    torch.mps.synchronize()
    assert [name.removesuffix("_f32") for name in kernels()] == [
        "flash_fwd", "flash_bwd_delta", "flash_bwd_dq", "flash_bwd_dkv"]


PY_14 = {
    "int64": lambda cu, _: (cu.long(), cu.long()),
    "on-the-cpu": lambda cu, _: (cu.cpu(), cu.cpu().long()),
    "one-object": lambda cu, _: (cu, cu),
    "slice": lambda cu, _: (cu.repeat_interleave(2)[::2], cu.repeat(2).view(2, -1).T[:, 0]),
}


def packed_self(place):
    packed = Packed((3, 40, 0, 17), (3, 40, 0, 17), Case(1, 2, 2, head_dim=24, head_dim_v=40))
    return make_packed(packed, place)


@pytest.mark.parametrize("name", PY_14)
def test_PY_14_cu_seqlens_of_any_kind(place, name):
    inputs = packed_self(place)
    cu_seqlens, expected = inputs.cu_seqlens[0], inputs.attend(**inputs.operands)
    same = replace(inputs, cu_seqlens=PY_14[name](cu_seqlens, place))
    for got, other in zip(same.attend(**inputs.operands), expected, strict=True):
        check_same_bits(got, other)


@pytest.mark.parametrize("max_seqlen", [0, 1, 39, 10**9, torch.tensor(40), torch.tensor(2)],
                         ids=str)
def test_PY_14_no_result_depends_on_max_seqlen(place, max_seqlen):
    inputs = packed_self(place)
    operands = [x.detach().requires_grad_() for x in inputs.operands.values()]
    results = []
    for length in (40, max_seqlen, max_seqlen.to(place) if torch.is_tensor(max_seqlen) else 7):
        outputs = torch_flash_mps.attention_varlen(*operands, *inputs.cu_seqlens, length, length,
                                                   return_lse=True)
        results.append([*outputs, *grads_of(outputs, operands)])
    for other in results[1:]:
        for got, expected in zip(other, results[0], strict=True):
            check_same_bits(got, expected)


# Beyond the rows, below 0, falling: (cu_seqlens_q, cu_seqlens_k, whether results are defined).
HOSTILE = {
    "beyond": ([0, 10, 1000], [0, 60, 2**31 - 1], True),
    "negative": ([-(2**31), -7, 20], [-5, -5, 50], True),
    "begins-late": ([7, 20, 30], [9, 9, 30], True),
    "k-falls": ([0, 20, 40], [50, 20, 0], False),
    "q-falls": ([30, 20, 10], [0, 25, 50], False),
    "extremes": ([2**31 - 1, -(2**31), 40], [0, 50, 50], False),
    "overlap": ([0, 30, 10, 40], [0, 30, 10, 40], False),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_HD_11_numbers_of_the_device_reach_no_other_memory(device, simulator, name):
    """Sequences that overlap write one row twice, which the device may report; nothing else."""
    *numbers, is_defined = HOSTILE[name]
    cu_seqlens = [torch.tensor(x, dtype=torch.int32).to(device) for x in numbers]
    operands = [torch.randn(rows, heads, 24).to(device).requires_grad_()
                for rows, heads in ((40, 4), (50, 2), (50, 2))]
    with contextlib.nullcontext() if simulator is None else simulator.checks():
        try:
            out, lse = OPS.attention_varlen_with_lse(*operands, *cu_seqlens, 40, 50, 0.0, True,
                                                     is_bottom_right=True)
            torch.mps.synchronize()
            gradients = grads_of([out, lse], operands)
            torch.mps.synchronize()
        except RuntimeError as fault:
            assert not is_defined and "threadgroups of one dispatch are not ordered" in str(fault)
            return
    for result in (out, *gradients):
        assert torch.isfinite(result).all()
    if name == "begins-late":
        check_exact(out[:7], 0.0)
        check_exact(out[30:], 0.0)
        check_exact(lse[:, :7], -torch.inf)
        for gradient, first, end in zip(gradients, (7, 9, 9), (30, 30, 30), strict=True):
            check_exact(gradient[:first], 0.0)
            check_exact(gradient[end:], 0.0)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("total_q, total_k, count", [(0, 5, 2), (5, 0, 2), (0, 0, 1), (5, 5, 0)])
def test_empty_sizes(place, total_q, total_k, count, sinks):
    operands = [torch.randn(rows, 2, 8).to(place).requires_grad_()
                for rows in (total_q, total_k, total_k)]
    sink = torch.ones(2).to(place).requires_grad_()
    lengths = [torch.linspace(0, total, count + 1).int().to(place) for total in (total_q, total_k)]
    out, lse = OPS.attention_varlen_with_lse(
        *operands, *lengths, total_q, total_k, sinks=sink if sinks else None,
        alibi_slopes=torch.ones(count, 2).to(place) if sinks else None)
    assert out.shape == (total_q, 2, 8) and lse.shape == (2, total_q)
    check_exact(out, 0.0)
    check_exact(lse, 1.0 if sinks and count else -torch.inf)
    leaves = [*operands, *([sink] if sinks else [])]
    for gradient, operand in zip(grads_of([out, lse], leaves), leaves, strict=True):
        assert gradient.shape == operand.shape
    for gradient in grads_of([out], operands):
        check_exact(gradient, 0.0)


@pytest.mark.parametrize("widths", [(0, 8), (8, 0)], ids=str)
def test_head_dims_of_0(place, widths):
    head_dim, head_dim_v = widths
    q, v = torch.ones(7, 2, head_dim).to(place), torch.ones(7, 2, head_dim_v).to(place)
    lengths = torch.tensor([0, 3, 7], dtype=torch.int32).to(place)
    out, lse = OPS.attention_varlen_with_lse(q, q, v, lengths, lengths, 4, 4)
    assert out.shape == (7, 2, head_dim_v)
    check_exact(lse[:, :3].exp(), 3.0 * torch.e ** (head_dim / max(head_dim, 1) ** 0.5), 1e-3)

