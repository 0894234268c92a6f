"""The classes of a mask's blocks: what they are, that they save work, that no result changes."""

import math
from dataclasses import replace

import pytest
import torch
from blocked_masks import BLOCK, HIDDEN, MIXED, OPEN, blocked_mask
from cases import Case, poisoned
from checks import check_same_bits
from gradients import case_operands, output_gradients
from torch import Tensor

INF = math.inf


def expected_classes(mask: Tensor) -> Tensor:
    """Block by block."""
    bias = torch.zeros(mask.shape).masked_fill(~mask, -INF) if mask.dtype == torch.bool else mask
    rows = bias.split(BLOCK, -2)
    return torch.stack([
        torch.stack([
            torch.where((block == -INF).flatten(-2).all(-1), HIDDEN,
                        torch.where((block == 0).flatten(-2).all(-1), OPEN, MIXED))
            for block in row.split(BLOCK, -1)
        ], -1) for row in rows
    ], -2).to(torch.uint8)


SHAPES = [(1, 1, 70, 100), (2, 3, 33, 64), (2, 1, 1, 100), (1, 2, 70, 1), (64, 31), (1, 1, 1, 1),
          (2, 2, 2, 40, 33), (3, 32, 32)]


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float16, torch.bfloat16])
def test_classes_are_those_of_each_block(place, dtype):
    for shape in SHAPES:
        mask = blocked_mask(shape, dtype)
        for layout in ("sliced", "strided"):
            given = poisoned(mask, place, layout)
            got = torch.ops.flash_mps.mask_block_classes(given)
            assert got.dtype == torch.uint8 and got.device == given.device
            torch.testing.assert_close(got.cpu(), expected_classes(mask), msg=f"{shape} {layout}")


def test_one_element_decides_the_class_of_its_block(place):
    """Each corner of a block, and what is neither hidden nor exactly zero."""
    for row, column in ((0, 0), (31, 31), (32, 0), (69, 99), (64, 95)):
        block = row // BLOCK, column // BLOCK
        for before, value, after in ((-INF, 0.0, MIXED), (0.0, -INF, MIXED), (0.0, 1e-30, MIXED),
                                     (-INF, math.nan, MIXED), (0.0, math.nan, MIXED),
                                     (0.0, INF, MIXED), (0.0, -0.0, OPEN),
                                     (-INF, torch.finfo(torch.float32).min, MIXED)):
            mask = torch.full((70, 100), before)
            mask[row, column] = value
            got = torch.ops.flash_mps.mask_block_classes(mask.to(place)).cpu()
            others = HIDDEN if before == -INF else OPEN
            assert got[block] == after, (row, column, before, value)
            assert (got != others).sum() == (after != others)


def test_KF_21_any_byte_but_0_is_visible(device):
    mask = torch.full((32, 64), 2, dtype=torch.uint8, device=device).view(torch.bool)
    assert torch.ops.flash_mps.mask_block_classes(mask).tolist() == [[OPEN, OPEN]]


def test_masks_without_elements_have_no_blocks(place):
    for shape, expected in (((0, 4), (0, 1)), ((3, 0), (1, 0)), ((0, 2, 5, 5), (0, 2, 1, 1))):
        mask = torch.ones(shape, dtype=torch.bool, device=place)
        assert torch.ops.flash_mps.mask_block_classes(mask).shape == expected


# Three kinds of masks, each with a dtype; grouped heads and a band throughout.
KINDS = [
    (Case(2, 4, 2, 100, 130, dtype=torch.float32, causal=True), (2, 1, 100, 130), torch.bool),
    (Case(2, 4, 2, 100, 130, dtype=torch.float16, window=(70, 40)), (1, 4, 100, 130),
     torch.float16),
    (Case(2, 4, 2, 70, 130, dtype=torch.bfloat16), (2, 4, 70, 130), torch.float32),
    (Case(2, 4, 2, 100, 130, dtype=torch.float16), (2, 1, 1, 130), torch.bool),
]
KIND_IDS = ["bool", "float16", "float32", "keys"]


def run(case: Case, mask: Tensor, classes: Tensor | None, changed=None) -> dict[str, Tensor]:
    """Out, lse and every gradient."""
    operands = case_operands(case, mask.device)
    if changed is not None:
        changed(operands)
    operands["attn_mask"] = mask
    leaves = {name: x.detach().requires_grad_() if x.is_floating_point() else x
              for name, x in operands.items()}
    left, right = case.window
    out, lse = torch.ops.flash_mps.attention_with_lse(
        *leaves.values(), is_causal=case.causal, enable_gqa=True, window_left=left,
        window_right=right, block_classes=classes)
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    found = torch.autograd.grad([out, lse], list(wanted.values()),
                                list(output_gradients(case, mask.device)))
    return {"out": out, "lse": lse} | dict(zip(wanted, found, strict=True))


def check_same(got: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert got.keys() == other.keys()
    for name, x in got.items():
        check_same_bits(x.detach(), other[name].detach(), name)


@pytest.mark.parametrize("kind", KINDS, ids=KIND_IDS)
@pytest.mark.parametrize("family", ["apple7", "apple9"])
def test_classes_never_change_a_bit(checked, device, on_family, family, kind):
    case, shape, dtype = kind
    if family == "apple9" and dtype != torch.float16:
        return   # one kind shows that the direct path heeds them too
    on_family(family)
    mask = poisoned(blocked_mask(shape, dtype), device)
    classes = torch.ops.flash_mps.mask_block_classes(mask)
    assert set(classes.flatten().tolist()) == {HIDDEN, MIXED, OPEN}
    without = run(case, mask, None)
    check_same(run(case, mask, classes), without)
    check_same(run(case, mask, torch.full_like(classes, MIXED)), without)


@pytest.mark.parametrize("operand", ["query", "key", "value"])
def test_KF_10_what_is_hidden_never_contributes(device, operand):
    """A NaN changes as much with classes as without: nothing beyond what sees it."""
    case, shape, dtype = KINDS[0]
    mask = blocked_mask(shape, dtype)
    mask[:, :, 64:, :32] = False
    mask[:, :, :, 64:96] = False   # keys that no query sees

    def changed(operands: dict[str, Tensor]) -> None:
        index = 40 if operand == "query" else 70
        operands[operand][:, :, index] = math.nan

    mask = mask.to(device)
    classes = torch.ops.flash_mps.mask_block_classes(mask)
    without = run(case, mask, None, changed)
    check_same(run(case, mask, classes, changed), without)
    if operand != "query":
        assert not any(torch.isnan(x).any() for x in without.values())
        return
    # The values of keys that this query does not see know nothing of it.
    seen = mask[:, 0, 40] & (torch.arange(case.seqlen_k, device=device) <= 40)
    is_nan = torch.isnan(without["value"])
    assert torch.equal(is_nan, seen[:, None, :, None].expand_as(is_nan))
    assert torch.isnan(without["out"]).sum() == case.batch * case.num_heads_q * case.head_dim


def test_hidden_blocks_are_skipped_and_the_mask_of_open_ones_is_not_read(device):
    """A table may say less than the mask holds; where it says more, it is believed."""
    case = replace(KINDS[0][0], causal=False)
    mask = torch.ones(2, 1, 100, 130, dtype=torch.bool, device=device)
    classes = torch.full((2, 1, 4, 5), MIXED, dtype=torch.uint8, device=device)
    classes[:, :, 1, 2] = HIDDEN
    hidden = mask.clone()
    hidden[:, :, 32:64, 64:96] = False
    check_same(run(case, mask, classes), run(case, hidden, None))
    check_same(run(case, hidden, torch.full_like(classes, OPEN)), run(case, mask, None))
    bias = torch.full((2, 4, 100, 130), 3.0, device=device)
    opened = run(case, bias, torch.full_like(classes, OPEN).expand(2, 4, 4, 5))
    check_same(opened, run(case, torch.zeros_like(bias), None))
