"""Packed sequences of any lengths and options against each alone; wide heads; split calls."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from checks import check_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import Packed, check_as_alone, check_packed, make_packed
from test_flash_fwd import SAME_EVERY_TIME
from test_varlen import PLAIN, SCORED

WINDOWS = st.one_of(st.just(-1), st.integers(0, 80))


@st.composite
def packed_cases(draw, max_rows):
    """Lengths, alignment, causal and windows of any kind; score options all on or all off."""
    lengths = st.one_of(st.integers(0, 3), st.integers(0, max_rows))
    pairs = draw(st.lists(st.tuples(lengths, lengths), min_size=1, max_size=6)
                 .filter(lambda pairs: any(q for q, _ in pairs)))
    seqlens_q, seqlens_k = zip(*pairs, strict=True)
    case = replace(draw(st.sampled_from((PLAIN, SCORED))).case, batch=len(pairs),
                   causal=draw(st.booleans()), window=(draw(WINDOWS), draw(WINDOWS)))
    return Packed(seqlens_q, seqlens_k, case, is_bottom_right=draw(st.booleans()))


@settings(SAME_EVERY_TIME, max_examples=40)
@given(packed=packed_cases(max_rows=80))
def test_any_lengths_and_options_together(place, packed):
    check_as_alone(packed, place)


@settings(SAME_EVERY_TIME, max_examples=8)
@given(packed=packed_cases(max_rows=50))
def test_any_options_together_checked_and_shuffled(device, checked, packed):
    check_as_alone(packed, device)


def test_KF_12_wide_heads(device, checked):
    """Whose columns are shared by several threadgroups."""
    case = replace(PLAIN.case, head_dim=296, head_dim_v=296, causal=True)
    check_packed(Packed((3, 0, 40), (20, 5, 33), case, is_bottom_right=True), device)


SPLIT = """
import sys, torch
if sys.platform != "darwin":
    import torch_flash_mps.simulator as simulator
import torch_flash_mps
rows, cu_seqlens, path = *torch.load(sys.argv[1]), sys.argv[2]
leaves = [x.to("mps").requires_grad_() for x in rows]
cu_seqlens = [x.to("mps") for x in cu_seqlens]
out, lse = torch_flash_mps.attention_varlen(*leaves, *cu_seqlens, 90, 90, return_lse=True)
gradients = torch.autograd.grad([out, lse], leaves, [torch.ones_like(out), torch.ones_like(lse)])
torch.mps.synchronize()
names = None if sys.platform == "darwin" else [x["kernel"] for x in simulator.counters()]
torch.save(([x.detach().cpu() for x in (out, lse, *gradients)], names), path)
"""


def test_HD_13_split_work_gives_the_same_bits(device, tmp_path):
    inputs = make_packed(PLAIN, device)
    given = tmp_path / "given.pt"
    torch.save(([x.detach().cpu() for x in inputs.operands.values()],
                [x.cpu() for x in inputs.cu_seqlens]), given)
    results = []
    for flop in ("1e12", "1e6"):
        path = tmp_path / f"{flop}.pt"
        subprocess.run([sys.executable, "-c", SPLIT, str(given), str(path)], check=True,
                       env={**os.environ, "TORCH_FLASH_MPS_MAX_DISPATCH_FLOP": flop})
        results.append(torch.load(path))
    (whole, names), (parts, split_names) = results
    for got, expected in zip(parts, whole, strict=True):
        check_same_bits(got, expected)
    if names is not None:
        for op in ("flash_fwd", "flash_bwd_dq", "flash_bwd_dkv"):
            assert sum(name.startswith(op) for name in names) == 1
            assert sum(name.startswith(op) for name in split_names) > 2


def test_torch_vmap_and_torch_func(place):
    x = torch.randn(3, 12, 2, 24).to(place)
    lengths = torch.tensor([0, 5, 12], dtype=torch.int32).to(place)

    def attend(x):
        return torch.ops.flash_mps.attention_varlen(x, x, x, lengths, lengths, 7, 7)

    check_same_bits(torch.vmap(attend)(x), torch.stack([attend(one) for one in x]))
    leaf = x[0].clone().requires_grad_()
    attend(leaf).square().sum().backward()
    got = torch.func.grad(lambda x: attend(x).square().sum())(x[0])
    check_same_bits(got, leaf.grad)


@pytest.mark.parametrize("count", [1, 2, 31, 33, 300])
def test_many_short_sequences(place, count):
    """The search for a block's sequence, at any number of them."""
    seqlens = tuple(i * 7 % 5 for i in range(1, count + 1))
    check_as_alone(Packed(seqlens, seqlens, replace(PLAIN.case, causal=True)), place)
