"""Encoders, and decoders that look at them, against transformers' own eager code: outputs,
gradients of all parameters, generation. And models that cannot be served.
"""

import pytest
import torch
from tiny_models import fused, tiny
from transformers import DynamicCache, EncoderDecoderCache

from torch_flash_mps.integrations.transformers import NAME, register

NO_DROPOUT = {
    "dropout": 0.0, "dropout_rate": 0.0, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
BOTH_SIDES = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 6,
              "decoder_attention_heads": 6, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
              "d_model": 48}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
MODELS = {
    "bert": {"initializer_range": 0.3},
    "vit": {"initializer_range": 0.3, "image_size": 12, "patch_size": 4, "num_labels": 5},
    "t5": {"d_model": 48, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 6,
           "relative_attention_num_buckets": 8, "relative_attention_max_distance": 6,
           "initializer_factor": 0.5, **SPECIAL},
    "whisper": {"init_std": 0.3, "num_mel_bins": 8, "max_source_positions": 10,
                "max_target_positions": 20, **BOTH_SIDES, **SPECIAL},
}
ALL = pytest.mark.parametrize("name", MODELS)
TOKENS = torch.arange(2 * 9).reshape(2, 9) * 5 % 90 + 3
PADDED = torch.tensor([[1] * 5 + [0] * 4, [1] * 9])
# Attention calls of one pass: encoder layers, decoder layers, cross attention.
CALLS = {"bert": 2, "vit": 2, "t5": 6, "whisper": 6}


def _model(name):
    model = tiny(name, **(NO_DROPOUT | MODELS[name]))
    if name == "t5":   # biases that matter, of both stacks
        for stack in (model.encoder, model.decoder):
            torch.nn.init.normal_(stack.block[0].layer[0].SelfAttention
                                  .relative_attention_bias.weight, std=2.0)
    return model


def _inputs(name):
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 12, 12)}
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": TOKENS[:, :6]}
    inputs = {"input_ids": TOKENS, "attention_mask": PADDED}
    return inputs | ({"decoder_input_ids": TOKENS[:, :6]} if name == "t5" else {})


def _output(model, inputs):
    there = {name: x.to(model.device) for name, x in inputs.items()}
    outputs = model(**there)
    if "last_hidden_state" not in outputs:
        return outputs.logits
    return outputs.last_hidden_state * there["attention_mask"].unsqueeze(-1)


def _close(got, expected, floor=1e-7):
    scale = expected.abs().max().item()
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-3, atol=1e-4 * scale + floor)


@ALL
def test_IN_05_outputs_equal_eager(device, kernels, name):
    """Every attention call runs a Metal kernel: as many as there are layers."""
    model, inputs = _model(name), _inputs(name)
    with torch.no_grad():
        expected = _output(model, inputs)
        kernels()
        _close(_output(fused(model, device), inputs), expected)
    assert len(kernels()) == CALLS[name]


@ALL
def test_IN_05_gradients_of_all_parameters_equal_eager(device, kernels, name):
    model, inputs = _model(name).train(), _inputs(name)

    def gradients():
        model.zero_grad()
        output = _output(model, inputs)
        weights = torch.linspace(-1, 1, output.numel()).reshape(output.shape)
        (output * weights.to(output.device)).sum().backward()
        return {name: parameter.grad.to("cpu", copy=True)
                for name, parameter in model.named_parameters() if parameter.grad is not None}

    expected = gradients()
    fused(model, device)
    kernels()
    got = gradients()
    ran = kernels()
    assert [ran.count(op) for op in ("flash_fwd", "flash_bwd_dq", "flash_bwd_dkv")] == (
        [CALLS[name]] * 3
    )
    assert list(got) == list(expected) and len(got) >= 15
    # Softmax does not see the bias of the keys, so its gradient is 0 but for rounding.
    floor = 1e-6 * max(gradient.abs().max().item() for gradient in expected.values())
    for parameter, gradient in got.items():
        _close(gradient, expected[parameter], floor)
    tables = [gradient for parameter, gradient in got.items() if "relative_attention" in parameter]
    assert len(tables) == (2 if name == "t5" else 0)
    assert all(table.abs().max() > 1e-3 for table in tables)


def test_IN_04_position_bias_changes_the_logits():
    """Else the tests of T5 could not notice that it is missing."""
    model, inputs = _model("t5"), _inputs("t5")
    with torch.no_grad():
        logits = _output(model, inputs)
        for stack in (model.encoder, model.decoder):
            table = stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight
            before = table.clone()
            assert (_output(model, inputs) - logits).abs().max() == 0
            table.zero_()
            assert (_output(model, inputs) - logits).abs().max() > 0.01
            table.copy_(before)


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_IN_05_decoding_steps_equal_eager(device, kernels, name):
    """One token after the other, with a cache of the decoder's and one of the encoder's keys."""
    def logits(model):
        inputs = {key: x.to(model.device) for key, x in _inputs(name).items()}
        tokens = inputs.pop("decoder_input_ids")
        cache = EncoderDecoderCache(DynamicCache(config=model.config),
                                    DynamicCache(config=model.config))
        steps = [model(**inputs, decoder_input_ids=token, cache=cache, use_cache=True).logits
                 for token in tokens.split(1, dim=1)]
        return torch.cat(steps, 1)

    model = _model(name)
    with torch.no_grad():
        torch.manual_seed(1)
        expected = logits(model)
        fused(model, device)
        kernels()
        torch.manual_seed(1)
        _close(logits(model), expected)
    assert len(kernels()) == 6 * CALLS[name]   # the encoder runs before each token


def test_IN_05_generation_with_an_encoder_equals_eager(device):
    def generate(model):
        return model.generate(
            TOKENS.to(model.device), attention_mask=PADDED.to(model.device), max_new_tokens=6,
            do_sample=False, output_logits=True, return_dict_in_generate=True,
        )

    model = _model("t5")
    expected = generate(model)
    got = generate(fused(model, device))
    assert got.sequences.tolist() == expected.sequences.tolist()
    for one, other in zip(got.logits, expected.logits, strict=True):
        _close(one, other)


REFUSED = {
    "bloom": ({"n_layer": 1, "n_head": 6}, "BloomForCausalLM computes attention in its own layers"),
    "nllb_moe": (BOTH_SIDES, "NllbMoeForConditionalGeneration has causal layers that do not say"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_would_compute_something_else_is_refused(name):
    """Layers of BLOOM would read our mask as scores to add, those of NLLB-MoE miss a mask."""
    options, expected = REFUSED[name]
    register()
    model = tiny(name, **options)
    for requested in (NAME, {"": NAME}):
        with pytest.raises(ValueError, match=f"metal_fused: {expected}"):
            model.set_attn_implementation(requested)
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match=f"metal_fused: {expected}"):
        type(model)._from_config(model.config, attn_implementation=NAME)


def test_no_model_that_can_be_served_is_refused():
    for name in ("llama", "gpt_oss", "bart", *MODELS):
        model = tiny(name, **MODELS.get(name, {}))
        model.set_attn_implementation(NAME)
        assert model.config._attn_implementation == NAME
