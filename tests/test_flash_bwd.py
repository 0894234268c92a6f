"""The backward kernels: every row of their tables, the same bits on every run, split work."""

import os
import subprocess
import sys

import pytest
import torch
from cases import DTYPE_NAMES, DTYPES, Case
from checks import check_exact
from gradients import case_operands, check_case_gradients, gradients, output_gradients
from tilings import tiling_cases

import torch_flash_mps
from torch_flash_mps.reference import attention_ref

SPLIT = """
import sys
import torch
if sys.platform == "linux":
    import torch_flash_mps.simulator as simulator
import torch_flash_mps
torch.manual_seed(0)
operands = [torch.randn(2, 3, 150, int(sys.argv[2])) for _ in range(3)]
leaves = [operand.to("mps").requires_grad_() for operand in operands]
out = torch_flash_mps.attention(*leaves, is_causal=True)
if sys.platform == "linux":
    simulator.reset_counters()
out.sum().backward()
torch.mps.synchronize()
names = [c["kernel"] for c in simulator.counters()] if sys.platform == "linux" else None
torch.save((operands, [leaf.grad.cpu() for leaf in leaves], names), sys.argv[1])
"""


CONCURRENT = """
import sys
import torch
if sys.platform == "linux":
    import torch_flash_mps.simulator as simulator
    simulator.checks(True)
    simulator.shuffle(1)
import torch_flash_mps
torch.manual_seed(0)
operands = [torch.randn(1, 2, 40, 16) for _ in range(4)]
*leaves, grad_out = (operand.to("mps") for operand in operands)
mask = torch.zeros(40, 40).to("mps").requires_grad_()
leaves = [leaf.requires_grad_() for leaf in leaves]
out = torch_flash_mps.attention(*leaves, attn_mask=mask)
got = torch.autograd.grad(out, [*leaves, mask], grad_out)
torch.mps.synchronize()
torch.save((operands, [gradient.cpu() for gradient in got]), sys.argv[1])
"""


@pytest.mark.parametrize(("tiling", "dtype"), tiling_cases("flash_bwd_dq", "flash_bwd_dkv"))
def test_instance(device, checked, on_family, tiling, dtype):
    if not on_family(tiling["family"]):
        return   # a Mac has one family, whose rows are tested there
    head_dim = tiling["max_head_dim"]
    check_case_gradients(
        Case(1, 2, 1, 2 * tiling["block_q"] + 3, 2 * tiling["block_k"] + 3, head_dim - 3, head_dim,
             dtype, causal=True, mask="bool_rows"),
        device, through_lse=True,
    )


@pytest.mark.parametrize("family", ["apple7", "apple9"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES.get)
def test_checked_mask_gradient(device, checked, on_family, family, dtype):
    if on_family(family):
        for mask in ("float", "float_rows", "float32"):
            check_case_gradients(Case(2, 4, 2, 19, 37, 40, dtype=dtype, mask=mask), device)


@pytest.mark.parametrize("deterministic", [False, True])
def test_BW_10_the_same_bits_on_every_run(device, simulator, deterministic):
    case = Case(1, 4, 2, 70, 70, 64, dtype=torch.float16, causal=True, mask="float")
    operands, (grad_out, grad_lse) = case_operands(case, device), output_gradients(case, device)
    torch.use_deterministic_algorithms(deterministic)

    def run(q, k, v, mask):
        return torch_flash_mps.attention(q, k, v, attn_mask=mask, is_causal=True, enable_gqa=True,
                                         return_lse=True)

    first = gradients(run, operands, grad_out, grad_lse)
    for seed in range(30):
        if simulator is not None:
            simulator.shuffle(seed)
        for name, gradient in gradients(run, operands, grad_out, grad_lse).items():
            assert torch.equal(gradient.cpu(), first[name].cpu()), f"{name}, run {seed}"
    if simulator is not None:
        simulator.shuffle(None)


def test_BW_11_repeated_calls_with_freed_gradients_agree(device):
    case = Case(1, 2, 2, 33, 40, 16)
    operands, (grad_out, _) = case_operands(case, device), output_gradients(case, device)

    def run(q, k, v, mask):
        return torch_flash_mps.attention(q, k, v, return_lse=True)

    first = gradients(run, operands, grad_out)
    for _ in range(200):
        repeated = gradients(run, operands, grad_out.clone())
        assert all(torch.equal(repeated[name], first[name]) for name in first)


@pytest.mark.parametrize(("head_dim", "flop"), [(24, "5e6"), (296, "1e8")])
def test_HD_13_split_work_gives_the_same_gradients(tmp_path, head_dim, flop):
    result = tmp_path / "result.pt"
    limit = {"TORCH_FLASH_MPS_MAX_DISPATCH_FLOP": flop}
    subprocess.run([sys.executable, "-c", SPLIT, str(result), str(head_dim)], check=True,
                   env={**os.environ, **limit})
    operands, got, names = torch.load(result)
    if names is not None:
        for op in ("flash_bwd_dq", "flash_bwd_dkv"):
            assert sum(name.startswith(op) for name in names) > 2
    leaves = [operand.double().requires_grad_() for operand in operands]
    attention_ref(*leaves, is_causal=True)[0].sum().backward()
    for gradient, leaf in zip(got, leaves, strict=True):
        check_exact(gradient, leaf.grad, 1e-5)


def test_HD_04_dependent_dispatches_are_ordered_in_a_concurrent_encoder(tmp_path):
    result = tmp_path / "result.pt"
    subprocess.run([sys.executable, "-c", CONCURRENT, str(result)], check=True,
                   env={**os.environ, "TORCH_FLASH_MPS_SIM_CONCURRENT": "1"})
    operands, got = torch.load(result)
    *leaves, grad_out = (operand.double() for operand in operands)
    leaves = [*(leaf.requires_grad_() for leaf in leaves),
              torch.zeros(40, 40, dtype=torch.float64, requires_grad=True)]
    out, _ = attention_ref(*leaves[:3], attn_mask=leaves[3])
    for gradient, expected in zip(got, torch.autograd.grad(out, leaves, grad_out), strict=True):
        check_exact(gradient, expected, 1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_gradient_of_a_broadcast_batch_is_rounded_once(device, masked):
    q, grad_out = (torch.randn(64, 2, 9, 16, dtype=torch.float16) for _ in range(2))
    k, v = (torch.randn(1, 2, 11, 16, dtype=torch.float16) for _ in range(2))
    bias = torch.randn(9, 11, dtype=torch.float16) if masked else None

    def gradient_of_value(function, dtype, place):
        query, key, value = (x.to(place, dtype).requires_grad_() for x in (q, k, v))
        mask = None if bias is None else bias.to(place, dtype)
        out = function(query, key, value, attn_mask=mask)
        return torch.autograd.grad(out, value, grad_out.to(place, dtype))[0]

    got = gradient_of_value(torch_flash_mps.attention, torch.float16, device)
    exact = gradient_of_value(lambda *x, **o: attention_ref(*x, **o)[0], torch.float64, "cpu")
    assert got.dtype == torch.float16 and got.shape == v.shape
    half_a_unit = exact.abs() * 2**-11   # of the last place, at most
    assert ((got.cpu().double() - exact).abs() <= half_a_unit + 2e-5).all()


def test_only_what_is_asked_for_is_computed(device, simulator):
    if simulator is None:
        return   # a Mac has no counters
    q, k, v = (torch.randn(1, 1, 9, 8, device=device) for _ in range(3))
    for wanted, expected in ((q, {"delta", "dq"}), (k, {"delta", "dkv"}), (v, {"delta", "dkv"})):
        wanted.requires_grad_()
        out = torch_flash_mps.attention(q, k, v)
        simulator.reset_counters()
        out.sum().backward()
        ran = {c["kernel"].split("_")[2] for c in simulator.counters()
               if c["kernel"].startswith("flash_bwd")}
        assert ran == expected
        wanted.requires_grad_(False)
