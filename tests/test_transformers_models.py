"""Decoders with windows, softcap and sinks against transformers' own eager code: logits in prefill
and in generation, and the gradients of all parameters.
"""

import measure
import pytest
import torch
from tiny_models import fused, tiny
from transformers import DynamicCache

from torch_flash_mps.integrations import transformers as integration
from torch_flash_mps.integrations.transformers_cache import Int8Cache

HYBRID = ["sliding_attention", "full_attention"]
# Weights so large that scores, softcap and sinks matter (`test_every_option_changes_the_logits`).
LARGE = {"num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3}
MODELS = {
    "llama": LARGE,
    "mistral": LARGE | {"sliding_window": 4},
    "qwen3": LARGE | {"use_sliding_window": True, "sliding_window": 4, "layer_types": HYBRID},
    "gemma2": LARGE | {
        "sliding_window": 4, "layer_types": HYBRID, "attn_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 20,
    },
    "gemma3": LARGE | {
        "sliding_window": 4, "layer_types": HYBRID, "query_pre_attn_scalar": 20,
    },
    "gpt_oss": LARGE | {
        "sliding_window": 4, "layer_types": HYBRID, "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
    # Its attention layers know their window and do not pass it to the attention function.
    "qwen2_moe": {
        "num_key_value_heads": 2, "initializer_range": 0.3, "use_sliding_window": True,
        "sliding_window": 4, "layer_types": HYBRID, "num_experts": 2, "num_experts_per_tok": 1,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    },
}
# IN-06: queries and keys of 24 columns, values of 16.
MODELS["deepseek_v3"] = {
    "initializer_range": 0.3, "num_key_value_heads": 6, "q_lora_rank": 20, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 2,
    "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
# The same models without one of their options.
WITHOUT = {
    "window": ("sliding_window", 64, ("mistral", "qwen3", "gemma2", "gemma3", "gpt_oss",
                                      "qwen2_moe")),
    "softcap": ("attn_logit_softcapping", None, ("gemma2",)),
    "scaling": ("query_pre_attn_scalar", 8, ("gemma2", "gemma3")),
}
TOKENS = torch.arange(2 * 13).reshape(2, 13) * 5 % 97
PADDED_LEFT = torch.tensor([[0] * 6 + [1] * 7, [1] * 13])
ALL = pytest.mark.parametrize("name", MODELS)


def _model(name, **options):
    model = tiny(name, **(MODELS[name] | options))
    if name == "gpt_oss":
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.sinks.copy_(torch.linspace(-1, 2, 6))
    return model


def _close(got, expected):
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.fixture
def masks(monkeypatch):
    """The mask, or None, of each call of the attention function."""
    given = []

    def attention(module, query, key, value, attention_mask, **kwargs):
        given.append(attention_mask)
        return original(module, query, key, value, attention_mask, **kwargs)

    original = integration.attention
    monkeypatch.setattr(integration, "attention", attention)
    yield given
    monkeypatch.undo()
    integration.register()


@pytest.mark.parametrize("name, option", [
    (name, option) for option, (_, _, names) in WITHOUT.items() for name in names
])
def test_every_option_changes_the_logits(name, option):
    """Else the tests below could not notice that it is missing."""
    key, value, _ = WITHOUT[option]
    with torch.no_grad():
        logits = _model(name)(TOKENS).logits
        assert (_model(name, **{key: value})(TOKENS).logits - logits).abs().max() > 0.01


@ALL
def test_IN_04_prefill_equals_eager_without_a_mask(device, masks, name):
    model = _model(name)
    with torch.no_grad():
        expected = model(TOKENS).logits
        _close(fused(model, device)(TOKENS.to(device)).logits, expected)
    assert masks == [None, None]


@ALL
def test_IN_02_left_padded_prefill_equals_eager(device, masks, name):
    model = _model(name)
    with torch.no_grad():
        expected = model(TOKENS, attention_mask=PADDED_LEFT).logits
        got = fused(model, device)(TOKENS.to(device), attention_mask=PADDED_LEFT.to(device)).logits
    seen = PADDED_LEFT.bool()
    _close(got.cpu()[seen], expected[seen])
    assert all(mask is not None for mask in masks)


@ALL
def test_IN_03_generation_equals_eager_without_a_mask(device, masks, name):
    """6 tokens after the prompt of 13, each layer's cache dropping what its window hides."""
    def generate(model):
        return model.generate(
            TOKENS.to(model.device), cache=DynamicCache(config=model.config), max_new_tokens=6,
            do_sample=False, pad_token_id=96, eos_token_id=None, output_logits=True,
            return_dict_in_generate=True,
        )

    model = _model(name)
    expected = generate(model)
    got = generate(fused(model, device))
    assert got.sequences.tolist() == expected.sequences.tolist()
    for one, other in zip(got.logits, expected.logits, strict=True):
        _close(one, other)
    assert masks == [None] * 2 * 6


@pytest.mark.parametrize("cache", [DynamicCache, Int8Cache])
@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_a_step_reads_the_keys_inside_its_window_once(device, name, cache):
    """Measured as examples/generate.py does. The 8-bit cache keeps the keys outside, too."""
    model = fused(_model(name), device)
    with torch.no_grad(), measure.Recorder(model) as recorder:
        cache = cache(config=model.config)
        model(TOKENS.to(device), cache=cache)
        for token in TOKENS[:, :2].split(1, dim=1):
            model(token.to(device), cache=cache)
    assert measure.largest_error(recorder.passes[-1].calls) < 1e-5
    measured = measure.bytes_read(recorder.passes[-1].calls)
    if measured is not None:   # a Mac does not count
        assert measured[0] == measured[1]


def _gradients(model):
    model.train()
    model.zero_grad()
    tokens = TOKENS.to(model.device)
    model(tokens, labels=tokens).loss.backward()
    return {name: parameter.grad.to("cpu", copy=True)
            for name, parameter in model.named_parameters() if parameter.grad is not None}


@ALL
def test_IN_04_gradients_of_all_parameters_equal_eager(device, masks, name):
    model = _model(name)
    expected = _gradients(model)
    got = _gradients(fused(model, device))
    assert list(got) == list(expected) and len(got) >= 15
    assert name != "gpt_oss" or got["model.layers.0.self_attn.sinks"].abs().max() > 1e-4
    for parameter, gradient in got.items():
        scale = expected[parameter].abs().max().item()
        torch.testing.assert_close(
            gradient, expected[parameter], rtol=1e-3, atol=1e-4 * scale + 1e-7,
            msg=lambda text, parameter=parameter: f"{parameter}: {text}",
        )
    assert masks == [None, None]


@ALL
def test_IN_07_output_attentions_raises(device, name):
    model = fused(_model(name), device)
    with torch.no_grad(), pytest.raises(ValueError, match="output_attentions is not supported"):
        model(TOKENS.to(device), output_attentions=True)
