"""When a call classifies the blocks of its mask first, and what PyTorch sees of it."""

import pytest
import torch
from blocked_masks import blocked_mask
from cases import Case, make_inputs
from checks import check_same_bits

import torch_flash_mps
from torch_flash_mps._extension import extension

PAYS = {
    # mask bytes, bytes of K and V, pairs, head_dim + head_dim_v, backward: who has such masks
    "padding, one head": (512, 0, 512**2, 128, False, False),
    "padding, 8 heads": (4 * 512, 0, 4 * 8 * 512**2, 128, False, True),
    "shared by 32 heads": (2048**2, 0, 32 * 2048**2, 256, False, True),
    "shared by 32 heads, float16": (2 * 2048**2, 0, 32 * 2048**2, 256, False, True),
    "own of every head": (32 * 2048**2, 0, 32 * 2048**2, 256, False, False),
    "own of every head, backward": (32 * 2048**2, 0, 32 * 2048**2, 256, True, True),
    "bias of every head": (2 * 32 * 2048**2, 0, 32 * 2048**2, 256, False, False),
    "bias of every head, backward": (2 * 32 * 2048**2, 0, 32 * 2048**2, 256, True, False),
    "MiniLM, short": (2 * 48, 0, 2 * 12 * 48**2, 64, False, False),
    "one query, 32 heads": (4096, 0, 32 * 4096, 256, False, False),
    "9 queries, 32 heads": (4096, 2**24, 9 * 32 * 4096, 256, False, True),
    "9 queries, short": (256, 2**20, 9 * 32 * 256, 256, False, False),
}


@pytest.mark.parametrize("name", PAYS)
def test_the_pre_pass_runs_where_it_is_small_beside_the_call(name):
    mask_bytes, key_bytes, pairs, width, has_backward, expected = PAYS[name]
    products = 2 * pairs * width * (4.5 if has_backward else 1)
    assert extension().mask_pass_pays(mask_bytes, key_bytes, products) == expected


def is_pre_pass(kernel: str) -> bool:
    return kernel.startswith("mask_block_classes")


@pytest.mark.parametrize("wants_gradient", [False, True])
def test_a_call_classifies_its_mask_once(device, kernels, wants_gradient):
    """Also one that was expanded: forward and backward together; and the result stays."""
    rows = 256 if wants_gradient else 512
    case = Case(1, 4, 4, rows, 1024, 64, dtype=torch.float16)
    q, k, v = (x.detach().requires_grad_(wants_gradient)
               for x in make_inputs(case, device).operands)
    keys = (torch.arange(1024, device=device) % 3 < 2) & (torch.arange(1024, device=device) > 768)
    mask = keys.expand(1, 4, rows, 1024)
    for rows_asked, expected in ((rows, True), (rows // 4, False)):
        plan = torch_flash_mps.explain(
            q[:, :, :rows_asked], k, v, attn_mask=mask[:, :, :rows_asked])
        assert plan["classifies_mask"] == expected
    kernels()
    out = torch_flash_mps.attention(q, k, v, attn_mask=mask)
    if wants_gradient:
        out.sum().backward()
    assert sum(map(is_pre_pass, kernels())) == 1
    mixed = torch.ones(1, 1, 1, 32, dtype=torch.uint8, device=device)
    other = torch.ops.flash_mps.attention(q, k, v, mask, block_classes=mixed)
    check_same_bits(out.detach(), other.detach())
    assert not any(map(is_pre_pass, kernels()))


@pytest.mark.parametrize("where", ["mps", "cpu"])
def test_PY_09_opcheck_with_classes(device, where):
    place = device if where == "mps" else "cpu"
    tests = torch.library.opcheck.__kwdefaults__["test_utils"]
    if where == "mps":   # of which this one knows nothing
        tests = [one for one in tests if one != "test_autograd_registration"]
    q, k, v = make_inputs(Case(2, 4, 4, 19, 33), place).operands
    mask = blocked_mask((2, 1, 19, 33), torch.float32).to(place)
    op = torch.ops.flash_mps.mask_block_classes
    assert set(torch.library.opcheck(op.default, (mask,), test_utils=tests).values()) == {"SUCCESS"}
    given = {"attn_mask": mask, "block_classes": op(mask)}
    for one in (torch.ops.flash_mps.attention, torch.ops.flash_mps.attention_with_lse):
        result = torch.library.opcheck(one.default, (q, k, v), given, test_utils=tests)
        assert set(result.values()) == {"SUCCESS"}
    out, lse = torch.ops.flash_mps.attention_with_lse(q, k, v, **given)
    result = torch.library.opcheck(
        torch.ops.flash_mps.attention_backward.default,
        (out, lse, q, k, v, out, lse, mask, 0.0, False),
        {"scale": None, "enable_gqa": False, "window_left": -1, "window_right": -1, "softcap": 0.0,
         "alibi_slopes": None, "sinks": None, "is_bottom_right": False, "rng_state": None,
         "block_classes": given["block_classes"], "output_mask": [True] * 4 + [False]})
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("dynamic", [False, True])
def test_PY_09_a_compiled_call_classifies_its_mask(device, kernels, dynamic):
    def loss(q, k, v, mask):
        return torch_flash_mps.attention(q, k, v, attn_mask=mask).float().square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    case = Case(1, 4, 4, 512, 1024, 64, dtype=torch.float16)
    mask = (torch.arange(1024, device=device) > 900).expand(1, 1, 512, 1024)
    found = []
    for function in (loss, compiled):
        q, k, v = (x.detach().requires_grad_() for x in make_inputs(case, device).operands)
        function(q, k, v, mask).backward()
        found.append((q.grad, k.grad, v.grad))
        times = sum(map(is_pre_pass, kernels()))
        # With sizes that the graph does not know, forward and backward find out for themselves.
        assert times == 1 or (times == 2 and dynamic and function is compiled)
    for one, other in zip(*found, strict=True):
        check_same_bits(one, other)


def test_BW_13_vmap_classifies_the_mask_of_all(device, kernels):
    q, k, v = (x[None].expand(3, -1, -1, -1, -1).clone()
               for x in make_inputs(Case(1, 4, 4, 256, 1024, 64), device).operands)
    masks = blocked_mask((3, 1, 1, 256, 1024), torch.bool).to(device)

    def gradient(q, k, v, mask):
        def loss(q):
            return torch_flash_mps.attention(q, k, v, attn_mask=mask).square().sum()

        return torch.func.grad(loss)(q)

    mapped = torch.vmap(gradient)(q, k, v, masks)
    assert sum(map(is_pre_pass, kernels())) == 1
    for index in range(3):
        torch.testing.assert_close(
            mapped[index], gradient(q[index], k[index], v[index], masks[index]))


@pytest.mark.parametrize("where", ["mps", "cpu"])
def test_HD_08_tables_that_do_not_fit_are_refused(device, where):
    place = device if where == "mps" else "cpu"
    q, k, v = make_inputs(Case(2, 4, 4, 40, 70), place).operands
    mask = torch.ones(2, 1, 40, 70, dtype=torch.bool, device=place)
    classes = torch.ops.flash_mps.mask_block_classes(mask)
    broadcastable = r"block_classes .* broadcastable to \[2, 4, 2, 3\], got shape "
    for wrong, said in (
        (classes[..., :2], broadcastable + r"\[2, 1, 2, 2\]"),
        (classes.repeat_interleave(2, -1), broadcastable + r"\[2, 1, 2, 6\]"),
        (classes[0, 0, 0], r"block_classes of rank 2 or more, .* got shape \[3\]"),
        (classes.int(), "block_classes of dtype Byte, got Int"),
        (classes.to("cpu" if where == "mps" else device), "block_classes on the device of query"),
    ):
        with pytest.raises(RuntimeError, match=f"attention: expected .*{said}"):
            torch.ops.flash_mps.attention(q, k, v, mask, block_classes=wrong)
    with pytest.raises(RuntimeError, match="expected attn_mask with block_classes, got none"):
        torch.ops.flash_mps.attention(q, k, v, block_classes=classes)
    for wrong, said in ((mask[0, 0, 0], r"attn_mask of rank 2 or more, got shape \[70\]"),
                        (mask.int(), "attn_mask of dtype Bool, Float, Half or BFloat16, got Int")):
        with pytest.raises(RuntimeError, match=f"mask_block_classes: expected {said}"):
            torch.ops.flash_mps.mask_block_classes(wrong)
