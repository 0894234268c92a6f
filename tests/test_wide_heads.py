"""Head dimensions above 288: several threadgroups share the columns of O, dQ, dK and dV."""

import pytest
import torch
from cases import DTYPE_NAMES, DTYPES, Case, make_inputs
from checks import check_case, check_exact, check_lse, check_same_bits
from gradients import check_case_gradients
from test_score_options import EVERYTHING

import torch_flash_mps
from torch_flash_mps.reference import attention_ref

HEAD_DIMS = [(576, 512), (8, 576), (576, 8), (299, 573)]


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES.get)
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_KF_11_KF_12_unequal_and_odd(device, checked, dtype, head_dims):
    """On poison: what lies behind the columns of a row is NaN."""
    case = Case(1, 4, 2, 33, 45, *head_dims, dtype=dtype, causal=True)
    inputs = make_inputs(case, device)
    check_lse(*inputs.operands, **inputs.options, case_id=case.id)
    first = check_case_gradients(case, device, through_lse=True)
    for name, gradient in check_case_gradients(case, device, through_lse=True).items():
        check_same_bits(gradient, first[name], f"{case.id}, {name}")


@pytest.mark.parametrize("family", ["apple7", "apple10"])
def test_with_every_option(device, checked, on_family, family):
    """A float mask with a gradient, a window, softcap, ALiBi and sinks."""
    if on_family(family):
        check_case_gradients(
            Case(2, 2, 1, 35, 40, 320, 304, torch.float16, mask="float", **EVERYTHING), device,
            through_lse=True)


@pytest.mark.parametrize("head_dims", [(8, 576), (576, 8)], ids=str)
def test_packed_sequences(device, checked, head_dims):
    lengths = (5, 0, 40, 33)
    bounds = torch.tensor((0, *lengths)).cumsum(0).int().to(device)
    shapes = [(sum(lengths), 2, dim) for dim in (head_dims[0], *head_dims)]
    leaves = [torch.randn(shape).to(device).requires_grad_() for shape in shapes]
    out = torch.ops.flash_mps.attention_varlen(
        *leaves, bounds, bounds, max(lengths), max(lengths), is_causal=True)
    grad_out = torch.randn(out.shape)
    got = torch.autograd.grad(out, leaves, grad_out.to(device))
    exact = [leaf.detach().cpu().double().requires_grad_() for leaf in leaves]
    members = zip(*(x.transpose(0, 1).split(lengths, 1) for x in exact), strict=True)
    expected = torch.cat([attention_ref(*one, is_causal=True)[0] for one in members], 1)
    check_exact(out, expected.transpose(0, 1), 1e-5)
    wanted = torch.autograd.grad(expected.transpose(0, 1), exact, grad_out.double())
    for gradient, one in zip(got, wanted, strict=True):
        check_exact(gradient, one, 2e-5)


IN_11 = {
    "SDXL-self": Case(2, 2, 2, 256, 256, 64, dtype=torch.float16),
    "SDXL-cross": Case(2, 2, 2, 256, 77, 64, dtype=torch.float16),
    "SD3-masked-cross": Case(2, 2, 2, 128, 77, 64, dtype=torch.float16, mask="bool"),
    "VAE-mid": Case(1, 1, 1, 256, 256, 512, dtype=torch.float16),
    "FLUX": Case(1, 2, 2, 288, 288, 128, dtype=torch.float16),
    "video": Case(1, 1, 1, 30000, 33, 64, dtype=torch.float16),
}


@pytest.mark.parametrize("case", IN_11.values(), ids=IN_11.keys())
def test_IN_11_chunks_of_queries_are_the_whole(device, case):
    """Of image and video models; with slices of the mask."""
    whole = check_case(case, device)
    assert torch.isfinite(whole).all()
    inputs = make_inputs(case, device)
    query, key, value = inputs.operands
    size = 96 if case.seqlen_q < 1000 else 11008
    for start in range(0, case.seqlen_q, size):
        rows = slice(start, start + size)
        mask = None if inputs.attn_mask is None else inputs.attn_mask[:, :, rows]
        chunk = torch_flash_mps.attention(query[:, :, rows], key, value, attn_mask=mask)
        check_same_bits(chunk, whole[:, :, rows])


def test_IN_11_gradients_of_a_VAE(device):
    check_case_gradients(Case(1, 1, 1, 72, 72, 512, dtype=torch.float16), device)


@pytest.mark.parametrize(("head_dims", "blocks"), [((576, 288), 1), ((8, 296), 2), ((8, 576), 2)])
def test_explain_tells_the_head_blocks(device, head_dims, blocks):
    query, value = (torch.zeros(1, 1, 20, dim, device=device) for dim in head_dims)
    assert torch_flash_mps.explain(query, query, value)["num_head_blocks"] == blocks
