"""`model.set_attention_backend("metal_fused")`: tiny random models of diffusers against its native
attention, outputs and gradients; the shapes of its large models in small; what is refused.
"""

import diffusers
import pytest
import torch
import torch.nn.functional as F
from checks import attention_lowp, check
from diffusers.models import attention_dispatch, attention_processor
from tiny_diffusers import CALLS, MODELS, run, tiny
from torch import nn

from torch_flash_mps.integrations.diffusers import NAME, register
from torch_flash_mps.reference import attention_ref

ALL = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def _native_afterwards():
    """The backend of a model is that of every model that has none of its own, in diffusers."""
    register()
    yield
    attention_dispatch._AttentionBackendRegistry.set_active_backend(
        attention_dispatch.AttentionBackendName.NATIVE
    )


def _fused(model, device):
    model.to(device)
    model.set_attention_backend(NAME)
    return model


def _close(got, expected, floor=1e-6):
    scale = expected.abs().max().item()
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-3, atol=1e-4 * scale + floor)


@ALL
def test_IN_11_outputs_equal_native(device, kernels, name):
    """Every attention layer runs a Metal kernel, and none when the backend is reset."""
    model = tiny(name)
    with torch.no_grad():
        expected = run(model, name)
        kernels()
        _close(run(_fused(model, device), name), expected)
        ran = kernels()
        assert len(ran) == CALLS[name] and set(ran) <= {"flash_fwd", "flash_decode"}
        model.set_attention_backend("native")
        model.reset_attention_backend()
        _close(run(model, name), expected)
        assert kernels() == []


@ALL
def test_IN_11_gradients_of_all_parameters_equal_native(device, kernels, name):
    def gradients(model):
        model.zero_grad()
        output = run(model, name)
        weights = torch.linspace(-1, 1, output.numel()).reshape(output.shape)
        (output * weights.to(output.device)).sum().backward()
        return {name: parameter.grad.to("cpu", copy=True)
                for name, parameter in model.named_parameters() if parameter.grad is not None}

    model = tiny(name)
    expected = gradients(model)
    _fused(model, device)
    kernels()
    got = gradients(model)
    ran = kernels()
    assert [ran.count(op) for op in ("flash_fwd", "flash_bwd_dq", "flash_bwd_dkv")] == (
        [CALLS[name]] * 3
    )
    assert list(got) == list(expected) and len(got) > 20
    floor = 1e-6 * max(gradient.abs().max().item() for gradient in expected.values())
    for parameter, gradient in got.items():
        _close(gradient, expected[parameter], floor)


@pytest.mark.parametrize("name", ["unet", "flux"])
def test_torch_compile_takes_the_backend(device, kernels, name):
    model = _fused(tiny(name), device)
    with torch.no_grad():
        expected = run(model, name)
        kernels()
        got = run(torch.compile(model, backend="aot_eager", fullgraph=True), name)
    assert len(kernels()) == CALLS[name]
    _close(got, expected.cpu())
    torch.compiler.reset()


def test_checkpointing_takes_the_backend(device, kernels):
    model = _fused(tiny("dit"), device).train()
    model.enable_gradient_checkpointing()
    run(model, "dit").sum().backward()
    ran = kernels()
    assert (ran.count("flash_fwd"), ran.count("flash_bwd_dq")) == (2 * CALLS["dit"], CALLS["dit"])


def _attention(q, k, v, **options):
    """Of `[batch, heads, seqlen, head_dim]`, through diffusers' dispatch."""
    operands = [x.transpose(1, 2) for x in (q, k, v)]
    return attention_dispatch.dispatch_attention_fn(
        *operands, backend=NAME, **options
    ).transpose(1, 2)


def _operands(batch, heads, seqlen_q, seqlen_k, head_dim, device):
    return [torch.randn(batch, heads, seqlen, head_dim, dtype=torch.float16).to(device)
            for seqlen in (seqlen_q, seqlen_k, seqlen_k)]


SHAPES = {
    "sdxl-self": (2, 10, 64, 64, 64),
    "sdxl-cross": (2, 10, 64, 77, 64),
    "flux": (1, 3, 72, 72, 128),
    "video": (1, 2, 600, 40, 128),
}


@pytest.mark.parametrize("name", SHAPES)
def test_IN_11_shapes_of_large_models(device, kernels, name):
    q, k, v = _operands(*SHAPES[name], device)
    kernels()
    out = _attention(q, k, v)
    assert kernels() == ["flash_fwd"]
    assert out.isfinite().all()
    check(out, attention_ref(q, k, v)[0], attention_lowp(q, k, v), case_id=name)


def test_IN_11_the_single_wide_head_of_a_vae(device, kernels):
    """512 columns, as between the convolutions of Stable Diffusion's."""
    layer = attention_processor.Attention(512, heads=1, dim_head=512, residual_connection=True)
    image = torch.randn(1, 512, 5, 5)

    def outcome(x):
        x = x.detach().requires_grad_()
        out = layer(x)
        out.square().sum().backward()
        return out.detach().cpu(), x.grad.cpu()

    expected = outcome(image)
    model = tiny("vae")
    model.extra = layer
    _fused(model, device)
    kernels()
    for got, wanted in zip(outcome(image.to(device)), expected, strict=True):
        _close(got, wanted)
    assert {"flash_fwd", "flash_bwd_dq", "flash_bwd_dkv"} <= set(kernels())


def test_IN_11_chunks_of_queries_equal_the_whole(device):
    """Each chunk with its slice of the mask, as memory-saving pipelines do."""
    q, k, v = _operands(2, 10, 64, 77, 64, device)
    mask = torch.randn(2, 1, 64, 77, dtype=torch.float16).to(device)
    whole = _attention(q, k, v, attn_mask=mask)
    chunks = [_attention(*part, attn_mask=rows) for part, rows in zip(
        ((rows, k, v) for rows in q.split(24, dim=2)), mask.split(24, dim=2), strict=True)]
    torch.testing.assert_close(torch.cat(chunks, dim=2).cpu(), whole.cpu(), rtol=0, atol=2e-3)


def test_a_mask_of_keys_is_that_of_the_native_backend(device):
    q, k, v = (x.float() for x in _operands(2, 10, 64, 77, 64, "cpu"))
    for mask in (torch.arange(77) < torch.tensor([[50], [77]]), torch.randn(2, 77)):
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
        got = _attention(*(x.to(device) for x in (q, k, v)), attn_mask=mask.to(device))
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_options_reach_the_kernel(device):
    q, k, v = (x.float() for x in _operands(1, 2, 20, 20, 64, "cpu"))
    there = [x.to(device) for x in (q, k[:, :1], v[:, :1])]
    got = _attention(*there, is_causal=True, scale=0.3, enable_gqa=True)
    expected = F.scaled_dot_product_attention(
        q, k[:, :1], v[:, :1], is_causal=True, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-5)
    assert _attention(*there, dropout_p=1.0, enable_gqa=True).abs().max() == 0


@pytest.mark.parametrize("options", [
    {"attention_kwargs": {"return_lse": True}},
    {"attention_kwargs": {"window": 4}},
    {"parallel_config": object()},
], ids=["lse", "unknown", "parallel"])
def test_an_argument_that_is_not_supported_is_never_dropped(device, options):
    q, k, v = _operands(1, 2, 20, 20, 64, device)
    with pytest.raises(ValueError, match="metal_fused: (return_lse|window|_parallel_config) is"):
        _attention(q, k, v, **options)


class _OwnAttention(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


def test_a_model_with_a_layer_out_of_reach_is_refused_as_a_whole():
    model = tiny("dit")
    for layer, expected in (
        (_OwnAttention(), "_OwnAttention calls F.scaled_dot_product_attention in extra"),
        (attention_processor.Attention(16, processor=attention_processor.AttnProcessor()),
         "AttnProcessor multiplies matrices in extra"),
    ):
        model.extra = layer
        with pytest.raises(ValueError, match=f"DiTTransformer2DModel has a layer .*{expected}"):
            model.set_attention_backend(NAME)
    processor = model.transformer_blocks[0].attn1.processor
    assert type(processor) is attention_processor.AttnProcessor2_0


def test_what_the_op_does_not_take_is_an_error_and_not_another_path(device):
    layer = attention_processor.Attention(600, heads=1, dim_head=600).to(device)
    model = tiny("dit")
    model.extra = layer
    _fused(model, device)
    with torch.no_grad(), pytest.raises(RuntimeError, match="flash_mps::attention: .*head_dim"):
        layer(torch.zeros(1, 20, 600, device=device))


def test_registering_again_changes_nothing():
    before = diffusers.ModelMixin.set_attention_backend
    register()
    assert diffusers.ModelMixin.set_attention_backend is before
    names = attention_dispatch.AttentionBackendName
    assert names(NAME) is names.METAL_FUSED and list(names).count(NAME) == 1
