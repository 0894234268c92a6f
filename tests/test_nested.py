"""Jagged nested tensors through F.scaled_dot_product_attention while enable_sdpa() holds."""

import pytest
import torch
import torch.nn.functional as F
from checks import attention_lowp, check, check_exact
from torch.nested._internal import ops as nested_ops

import torch_flash_mps
from torch_flash_mps.reference import attention_ref

OFFSETS = [0, 5, 38, 39, 39, 60]


def jagged(device, heads, offsets, head_dim=24):
    """A leaf `[total, heads, head_dim]`, and `[batch, heads, seqlen, head_dim]` jagged on it."""
    rows = torch.randn(int(offsets[-1]), heads, head_dim).to(device).requires_grad_()
    return rows, torch.nested.nested_tensor_from_jagged(rows, offsets).transpose(1, 2)


def references(rows, offsets, function, **options):
    parts = zip(*(x.split(list(torch.tensor(offsets).diff())) for x in rows), strict=True)
    outs = [function(*(x.transpose(0, 1)[None] for x in part), **options)[0][0].transpose(0, 1)
            for part in parts if len(part[0])]
    return torch.cat(outs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=str)
def test_jagged_tensors_take_the_kernels_with_gradients(device, kernels, causal, heads):
    offsets = torch.tensor(OFFSETS).to(device)
    leaves, operands = zip(*(jagged(device, n, offsets) for n in (heads[0], heads[1], heads[1])),
                           strict=True)
    with torch_flash_mps.sdpa_enabled():
        kernels()
        out = F.scaled_dot_product_attention(*operands, is_causal=causal, scale=0.3,
                                             enable_gqa=heads[0] != heads[1])
    grad = torch.randn(OFFSETS[-1], heads[0], 24)
    assert out.layout == torch.jagged and out.shape == operands[0].shape
    values = (out.transpose(1, 2) * 1.0).values()
    got = torch.autograd.grad(values, leaves, grad.to(device))
    torch.mps.synchronize()
    assert {"flash_fwd", "flash_bwd_dq", "flash_bwd_dkv"} <= set(kernels())
    own = [x.detach().cpu().double().requires_grad_() for x in leaves]
    ref = references(own, OFFSETS, attention_ref, is_causal=causal, scale=0.3)
    lowp = references([x.detach().cpu() for x in leaves], OFFSETS,
                      lambda *x, **options: (attention_lowp(*x, **options), None),
                      is_causal=causal, scale=0.3)
    check(values, ref, lowp)
    for one, other in zip(got, torch.autograd.grad(ref, own, grad.double()), strict=True):
        check_exact(one, other, 1e-5)


def test_queries_and_keys_of_other_lengths(device):
    q_offsets = torch.tensor([0, 3, 4, 9]).to(device)
    k_offsets = torch.tensor([0, 20, 20, 33]).to(device)
    _, q = jagged(device, 2, q_offsets)
    rows, k = jagged(device, 2, k_offsets)
    with torch_flash_mps.sdpa_enabled():
        out = F.scaled_dot_product_attention(q, k, k).transpose(1, 2).values()
    check_exact(out[3], 0.0)   # without keys
    ref, _ = attention_ref(*(x.detach().transpose(0, 1)[None] for x in (
        q.transpose(1, 2).values()[4:], rows[20:], rows[20:])))
    check_exact(out[4:], ref[0].transpose(0, 1), 1e-5)


def test_keys_and_values_that_were_made_apart(device):
    """Each with offsets of its own, of the same numbers; gradients too."""
    parts = [[torch.randn(n, 2, 24).requires_grad_() for n in sizes]
             for sizes in ((3, 1, 5), (20, 4, 13), (20, 4, 13))]
    leaves = sum(parts, [])
    expected = [F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in one)).transpose(0, 1)
                for one in zip(*parts, strict=True)]
    operands = [torch.nested.as_nested_tensor([x.to(device) for x in one], layout=torch.jagged)
                .transpose(1, 2) for one in parts]
    with torch_flash_mps.sdpa_enabled():
        values = F.scaled_dot_product_attention(*operands).transpose(1, 2).values()
    check_exact(values, torch.cat(expected), 1e-5)
    grads = [torch.autograd.grad(one.square().sum(), leaves)
             for one in (values.cpu(), torch.cat(expected))]
    for got, one in zip(*grads, strict=True):
        check_exact(got, one, 1e-4)


def test_a_jagged_layer_trains(device):
    """Projections of a nested tensor, attention, and back, as a model has it."""
    parts = [torch.randn(n, 16) for n in (3, 17, 1)]
    layer = torch.nn.Linear(16, 48)

    def attend(x):
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(-3, -2) for y in layer(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v).transpose(-3, -2).flatten(-2)

    expected = torch.autograd.grad(sum(attend(x[None]).square().sum() for x in parts),
                                   list(layer.parameters()))
    layer.to(device)
    x = torch.nested.nested_tensor([x.to(device) for x in parts], layout=torch.jagged)
    with torch_flash_mps.sdpa_enabled():
        loss = attend(x).values().square().sum()
    for got, one in zip(torch.autograd.grad(loss, list(layer.parameters())), expected, strict=True):
        check_exact(got, one, 1e-4)


def test_only_while_enabled_and_never_twice(device):
    name = "jagged_scaled_dot_product_attention"
    before = getattr(nested_ops, name)
    with torch_flash_mps.sdpa_enabled():
        ours = getattr(nested_ops, name)
        assert ours is not before
        with torch_flash_mps.sdpa_enabled():
            assert getattr(nested_ops, name) is ours
        assert getattr(nested_ops, name) is ours
    assert getattr(nested_ops, name) is before


def test_cpu_tensors_and_masks_go_to_pytorch(device):
    offsets = torch.tensor([0, 3, 7])
    with torch_flash_mps.sdpa_enabled():
        _, x = jagged("cpu", 2, offsets)
        assert F.scaled_dot_product_attention(x, x, x).layout == torch.jagged
        _, x = jagged(device, 2, offsets.to(device))
        with pytest.raises(ValueError, match="Masks are not yet supported"):
            F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(1, device=device))


def test_errors_say_what_does_not_fit(device):
    offsets = torch.tensor([0, 3, 7]).to(device)
    _, q = jagged(device, 4, offsets)
    _, k = jagged(device, 2, offsets)
    _, v = jagged(device, 2, torch.tensor([0, 4, 7]).to(device))
    with torch_flash_mps.sdpa_enabled():
        with pytest.raises(RuntimeError, match="expected enable_gqa=True"):
            F.scaled_dot_product_attention(q, k, k)
        with pytest.raises(RuntimeError, match="value with the sequence lengths of key"):
            F.scaled_dot_product_attention(k, k, v)


def test_PY_09_under_torch_compile(device):
    offsets = torch.tensor(OFFSETS).to(device)
    rows, _ = jagged(device, 2, offsets)

    def loss(rows):
        x = torch.nested.nested_tensor_from_jagged(rows, offsets).transpose(1, 2)
        out = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return out.transpose(1, 2).values().square().sum()

    torch._dynamo.reset()
    with torch_flash_mps.sdpa_enabled():
        losses = [loss(rows), torch.compile(loss, backend="aot_eager")(rows)]
    gradients = [torch.autograd.grad(one, rows)[0] for one in losses]
    check_exact(losses[1], losses[0])
    check_exact(gradients[1], gradients[0])


def test_PY_08_autocast(device):
    _, x = jagged(device, 2, torch.tensor(OFFSETS).to(device))
    with torch_flash_mps.sdpa_enabled(), torch.autocast("mps", torch.bfloat16):
        out = F.scaled_dot_product_attention(x, x, x)
    assert out.dtype == torch.bfloat16
    assert (out + x).shape == x.shape   # lengths are known to be the same
