"""The 8-bit KV cache for transformers (`Int8Cache`)."""

import pytest
import torch
from checks import check
from tiny_models import fused, tiny
from torch import nn
from transformers import LlamaConfig

import torch_flash_mps
from torch_flash_mps.integrations.transformers import NAME, Int8States, attention
from torch_flash_mps.integrations.transformers_cache import Int8Cache
from torch_flash_mps.reference import attention_ref

HEADS, HEAD_DIM = 2, 8


def _cache(place, implementation=NAME):
    """A cache of one layer, and a function that puts random states of `length` tokens into it."""
    config = LlamaConfig(num_hidden_layers=1)
    config._attn_implementation = implementation
    cache = Int8Cache(config)

    def extend(length, batch=2, dtype=torch.float32):
        states = [
            torch.randn(batch, HEADS, length, HEAD_DIM, device=place, dtype=dtype) for _ in range(2)
        ]
        return states, cache.update(*states, 0)

    return cache, extend


def test_cache_holds_what_quantize_kv_makes(place):
    """Over 200 tokens: the tensors behind it are replaced twice by larger ones."""
    cache, extend = _cache(place)
    lengths = (5, 1, 60, 1, 130, 3)
    added = []
    for length in lengths:
        states, got = extend(length)
        added.append(states)
    for index, states in enumerate(got):
        data, scale = torch_flash_mps.quantize_kv(torch.cat([x[index] for x in added], 2))
        assert isinstance(states, Int8States) and states.shape == data.shape
        assert torch.equal(states.data.cpu(), data.cpu())
        assert torch.equal(states.scale.cpu(), scale.cpu())
    assert cache.get_seq_length() == sum(lengths)


def test_the_first_pass_sees_the_exact_states(place):
    _, extend = _cache(place)
    states, got = extend(4)
    assert all(x is y for x, y in zip(states, got, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_attention_functions_get_dequantised_tensors(place, dtype):
    _, extend = _cache(place, "eager")
    first, _ = extend(3, dtype=dtype)
    second, got = extend(2, dtype=dtype)
    for one, other, states in zip(first, second, got, strict=True):
        exact = torch.cat([one, other], 2)
        data, scale = torch_flash_mps.quantize_kv(exact)
        assert states.dtype == dtype
        assert torch.equal(states, (data.float() * scale[..., None]).to(dtype))
        step = scale[..., None] * (0.5 + 127 * torch.finfo(dtype).eps)
        assert ((states.float() - exact.float()).abs() <= step).all()


@pytest.mark.parametrize("seqlen_q", [1, 3, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_is_that_of_the_dequantised_cache(place, dtype, seqlen_q):
    _, extend = _cache(place)
    extend(30, dtype=dtype)
    _, (key, value) = extend(seqlen_q, dtype=dtype)
    query = torch.randn(2, 3 * HEADS, seqlen_q, HEAD_DIM, device=place, dtype=dtype)
    seqlen_k = 30 + seqlen_q
    mask = torch.ones(2, 1, seqlen_q, seqlen_k, dtype=torch.bool).tril(seqlen_k - seqlen_q)
    mask[0, :, :, :7] = False   # left padding
    out, weights = attention(nn.Module(), query, key, value, mask.to(place), scaling=0.3)
    assert weights is None
    exact = [x.dequantize(torch.float64) for x in (key, value)] if place.type == "cpu" else [
        Int8States(x.data.cpu(), x.scale.cpu()).dequantize(torch.float64) for x in (key, value)
    ]
    expected, _ = attention_ref(query, *exact, attn_mask=mask, scale=0.3)
    lowp, _ = attention_ref(query, *exact, attn_mask=mask, scale=0.3, dtype=dtype)
    check(out.cpu(), expected.transpose(1, 2), lowp.transpose(1, 2))


@pytest.mark.parametrize("option", ["sliding_window", "softcap", "s_aux"])
def test_IN_04_options_reach_the_kernel_of_the_8_bit_cache(place, option):
    _, extend = _cache(place)
    extend(29)
    _, (key, value) = extend(1)
    query = torch.randn(2, HEADS, 1, HEAD_DIM, device=place)
    sinks = torch.tensor([0.5, -1.0], device=place)
    given = {"sliding_window": 7, "softcap": 0.8, "s_aux": sinks}[option]
    of_op = {
        "sliding_window": {"window_left": 6, "causal_offset": 29},
        "softcap": {"softcap": 0.8},
        "s_aux": {"sinks": sinks},
    }[option]
    out, _ = attention(nn.Module(), query, key, value, None, scaling=0.3, **{option: given})
    exact = [
        Int8States(x.data.cpu(), x.scale.cpu()).dequantize(torch.float64) for x in (key, value)
    ]
    expected, _ = attention_ref(query, *exact, scale=0.3, **of_op)
    without, _ = attention_ref(query, *exact, scale=0.3)
    assert (expected - without).abs().max() > 0.01
    check(out.cpu(), expected.transpose(1, 2))


def test_a_decode_step_gives_the_logits_of_eager_on_the_same_cache(device):
    model = tiny("llama", num_key_value_heads=2)
    prompt, token = torch.arange(2 * 9).reshape(2, 9), torch.tensor([[3], [4]])

    def step():
        cache = Int8Cache(model.config)
        model(prompt.to(model.device), cache=cache)
        return model(token.to(model.device), cache=cache).logits.cpu()

    with torch.no_grad():
        expected = step()
        got = fused(model, device) and step()
    # A state at the border of two integers may be rounded otherwise: one step of a state's scale.
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-3)


def test_crop_select_repeat_reset(place):
    cache, extend = _cache(place)
    extend(4)
    _, before = extend(6)
    cache.crop(-5)
    assert cache.get_seq_length() == 5
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0], device=place))
    cache.reorder_cache(torch.tensor([0, 0], device=place))
    _, after = extend(1)
    for one, other in zip(before, after, strict=True):
        for name in ("data", "scale"):
            expected = getattr(one, name)[[1, 1], :, :5]
            assert torch.equal(getattr(other, name)[:, :, :5], expected)
    cache.reset()
    assert cache.get_seq_length() == 0
    states, got = extend(2)
    assert got[0] is states[0]


@pytest.mark.parametrize("given", [1, -5])
def test_crop_refuses_what_it_cannot_do(given):
    cache, extend = _cache("cpu")
    extend(4)
    with pytest.raises(ValueError, match=f"at most 4 of them, got {given}"):
        cache.crop(given)


def test_IN_04_dropout_over_the_cache_is_refused(place):
    _, extend = _cache(place)
    extend(4)
    _, (key, value) = extend(1)
    query = torch.zeros(2, HEADS, 1, HEAD_DIM, device=place)
    with pytest.raises(ValueError, match=f"{NAME}: dropout is not supported"):
        attention(nn.Module(), query, key, value, None, dropout=0.1)


def test_a_model_with_other_layers_is_refused():
    config = LlamaConfig(num_hidden_layers=2)
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match=r"Int8Cache: .*got \['linear_attention'\]"):
        Int8Cache(config)
