"""`enable_sdpa`: F.scaled_dot_product_attention on mps tensors through our op, and back."""

import pytest
import torch
import torch.nn.functional as F
from sdpa_support import close, dispatch_tables, inputs
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention as imported_early

from torch_flash_mps import disable_sdpa, sdpa_enabled


@pytest.fixture(autouse=True)
def restored():
    """Whatever a test switches on, PyTorch's own kernels are back after it."""
    before = dispatch_tables()
    yield
    disable_sdpa()
    assert dispatch_tables() == before


def mask_of(device, *shape):
    return (torch.rand(shape) < 0.7).logical_or(torch.eye(shape[-2], shape[-1]).bool()).to(device)


CALLS = {
    "plain": lambda f, q, k, v: f(q, k, v),
    "positional": lambda f, q, k, v: f(q, k, v, mask_of(q.device, 17, 17), 0.0, False),
    "keywords": lambda f, q, k, v: f(query=q, key=k, value=v, attn_mask=None, dropout_p=0.0,
                                     is_causal=True, scale=0.3, enable_gqa=False),
    "float mask": lambda f, q, k, v: f(q, k, v, torch.randn(2, 1, 17, 17).to(q.device)),
    "grouped": lambda f, q, k, v: f(q, k[:, :1], v[:, :1], enable_gqa=True),
    "rank 3": lambda f, q, k, v: f(q[0], k[0], v[0], is_causal=True),
    "rank 2": lambda f, q, k, v: f(q[0, 0], k[0, 0], v[0, 0]),
    "lengths": lambda f, q, k, v: f(q[..., :5, :], k, v),
    "head_dim_v": lambda f, q, k, v: f(q, k, v[..., :8]),
    "early import": lambda f, q, k, v: imported_early(q, k, v),
    "aten": lambda f, q, k, v: torch.ops.aten.scaled_dot_product_attention(q, k, v),
}


@pytest.mark.parametrize("name", CALLS)
def test_IN_09_every_way_to_call_reaches_the_kernel(name, device, kernels, seed):
    q, k, v = inputs(device)
    torch.manual_seed(seed)
    expected = CALLS[name](F.scaled_dot_product_attention, q.cpu(), k.cpu(), v.cpu())
    assert kernels() == []
    for mode in (torch.no_grad, torch.inference_mode):
        torch.manual_seed(seed)
        with sdpa_enabled(), mode():
            got = CALLS[name](F.scaled_dot_product_attention, q, k, v)
        assert got.device == q.device
        close(got, expected)
        assert kernels() == ["flash_decode" if name == "lengths" else "flash_fwd"]
    torch.manual_seed(seed)
    close(CALLS[name](F.scaled_dot_product_attention, q, k, v), expected)
    assert kernels() == []


LEFT_TO_PYTORCH = {
    "head_dim": ((1, 1, 4, 584), {}),
    "mask with causal": ((1, 1, 4, 8), {"attn_mask": torch.ones(4, 4).bool(), "is_causal": True}),
    "mask of another dtype": ((1, 1, 4, 8), {"attn_mask": torch.ones(4, 4).half()}),
    "unfit mask": ((1, 1, 4, 8), {"attn_mask": torch.ones(3, 4).bool()}),
}


def outcome(q, options):
    try:
        return F.scaled_dot_product_attention(q, q, q, **options)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("name", LEFT_TO_PYTORCH)
def test_IN_09_what_the_op_does_not_take_is_as_before(name, device, kernels):
    shape, options = LEFT_TO_PYTORCH[name]
    q = torch.randn(shape).to(device).requires_grad_()
    options = {name: option.to(device) if isinstance(option, torch.Tensor) else option
               for name, option in options.items()}
    for mode in (torch.enable_grad, torch.inference_mode):
        with mode():
            expected = outcome(q, options)
            with sdpa_enabled():
                got = outcome(q, options)
        if isinstance(expected, str):
            assert got == expected
        else:
            assert torch.equal(got, expected) and got.requires_grad == expected.requires_grad
    assert kernels() == []


def test_IN_09_head_counts_that_broadcast_are_left_to_pytorch(device, kernels):
    q, k, v = inputs(device)
    k, v = k[:, :1], v[:, :1]
    expected = F.scaled_dot_product_attention(q, k, v)
    with sdpa_enabled():
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), expected)
    assert kernels() == []


def test_IN_09_unknown_keyword_is_pytorchs_error(device):
    q, k, v = inputs(device)
    with sdpa_enabled(), pytest.raises(TypeError, match="colour"):
        F.scaled_dot_product_attention(q, k, v, colour="red")


def test_IN_09_cpu_tensors_are_untouched(device, kernels):
    q, k, v = inputs("cpu")
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    with sdpa_enabled():
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, is_causal=True), expected)
        with pytest.raises(RuntimeError, match="same device"):
            F.scaled_dot_product_attention(q.to(device), k, v)
    assert kernels() == []


def test_gradients(device, kernels):
    on_device = inputs(device, requires_grad=True)
    on_cpu = [tensor.detach().cpu().requires_grad_() for tensor in on_device]
    mask = torch.randn(1, 3, 17, 17)
    masks = [mask.to(device).requires_grad_(), mask.requires_grad_()]
    grad_out = torch.randn(2, 3, 17, 16)
    with sdpa_enabled():
        out = F.scaled_dot_product_attention(*on_device, masks[0])
    out.backward(grad_out.to(device))   # backward follows also after the block
    ran = kernels()
    assert ran[0] == "flash_fwd" and {"flash_bwd_dq", "flash_bwd_dkv"} <= set(ran)
    F.scaled_dot_product_attention(*on_cpu, masks[1]).backward(grad_out)
    for got, expected in zip([*on_device, masks[0]], [*on_cpu, masks[1]], strict=True):
        close(got.grad, expected.grad)


def test_forward_mode_is_left_to_pytorch(device, kernels):
    q, k, v = inputs(device)

    def tangent():
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(q, k)
            out = F.scaled_dot_product_attention(dual, k, v)
            return forward_ad.unpack_dual(out).tangent

    expected = tangent()
    with sdpa_enabled():
        assert torch.equal(tangent(), expected)
    assert kernels() == []


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_IN_09_under_compile(device, kernels, dynamic, requires_grad):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2,
        backend="aot_eager", fullgraph=True, dynamic=dynamic,
    )
    with sdpa_enabled():
        for length in (17, 9):
            operands = inputs(device, 2, 3, length, 16, requires_grad=requires_grad)
            on_cpu = [tensor.detach().cpu().requires_grad_(requires_grad) for tensor in operands]
            expected = F.scaled_dot_product_attention(*on_cpu, is_causal=True) * 2
            kernels()
            got = compiled(*operands)
            close(got, expected)
            assert kernels() == ["flash_fwd" if length > 16 else "flash_decode"]
            if requires_grad:
                got.sum().backward()
                expected.sum().backward()
                assert "flash_bwd_dkv" in kernels()
                for ours, theirs in zip(operands, on_cpu, strict=True):
                    close(ours.grad, theirs.grad)
    torch._dynamo.reset()


def test_autocast(device, kernels):
    q, k, v = inputs(device)
    with sdpa_enabled(), torch.autocast("mps", torch.float16):
        assert F.scaled_dot_product_attention(q, k, v).dtype == torch.float16
    assert kernels() == ["flash_fwd"]
