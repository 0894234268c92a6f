"""Packed sequences in transformers: position ids that restart, and cu_seq_lens_* of the caller."""

import pytest
import torch
from test_transformers_models import _close, _model, masks  # noqa: F401
from tiny_models import fused
from transformers import DataCollatorWithFlattening
from transformers.masking_utils import create_causal_mask

from torch_flash_mps.integrations import transformers as integration

LENGTHS = (3, 5, 4)
TOKENS = torch.arange(12)[None] * 7 % 97
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
CU_SEQLENS = torch.tensor([0, 3, 8, 12], dtype=torch.int32)
KWARGS = {"cu_seq_lens_q": CU_SEQLENS, "cu_seq_lens_k": CU_SEQLENS, "max_length_q": 5,
          "max_length_k": 5}
PACKED = pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "qwen3", "deepseek_v3"])


def on(device, inputs):
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}


@PACKED
def test_IN_08_restarting_positions_equal_each_document_alone(device, masks, name):  # noqa: F811
    model = _model(name)
    with torch.no_grad():
        apart = [model(x).logits for x in TOKENS.split(LENGTHS, dim=1)]
        packed = fused(model, device)(TOKENS.to(device), position_ids=POSITIONS.to(device),
                                      use_cache=False).logits
    _close(packed, torch.cat(apart, 1))
    assert {x.tolist() == CU_SEQLENS.tolist() for x in masks} == {True}   # and no [S, S] mask


@PACKED
def test_IN_08_gradients_of_packed_documents(device, name):
    model = _model(name)
    inputs = {"input_ids": TOKENS, "position_ids": POSITIONS, "labels": TOKENS, "use_cache": False}
    names, parameters = zip(*model.named_parameters(), strict=True)

    def gradients(place):
        loss = model(**on(place, inputs)).loss
        return torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)

    expected = gradients("cpu")
    model = fused(model, device)
    names, parameters = zip(*model.named_parameters(), strict=True)
    for parameter, got, one in zip(names, gradients(device), expected, strict=True):
        torch.testing.assert_close(got.cpu(), one, rtol=1e-3, atol=1e-4, msg=parameter)


def test_IN_08_two_rows_of_documents(device):
    model = _model("mistral")
    positions = torch.cat([POSITIONS, torch.cat([torch.arange(n) for n in (4, 1, 7)])[None]])
    tokens = torch.cat([TOKENS, TOKENS + 3]) % 97
    with torch.no_grad():
        expected = model(tokens, position_ids=positions, use_cache=False).logits
        got = fused(model, device)(tokens.to(device), position_ids=positions.to(device),
                                   use_cache=False).logits
    _close(got, expected)


@pytest.mark.parametrize(("name", "has_positions"), [
    ("llama", True), ("llama", False), ("gpt_oss", True),   # which makes no packed mask itself
])
def test_IN_08_boundaries_of_the_caller(device, name, has_positions):
    """As DataCollatorWithFlattening makes them."""
    documents = [{"input_ids": x[0].tolist()} for x in TOKENS.split(LENGTHS, dim=1)]
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt")
    batch = dict(collator(documents))
    batch.pop("labels")
    assert batch["cu_seq_lens_q"].tolist() == CU_SEQLENS.tolist()
    model = _model(name)
    with torch.no_grad():
        expected = [model(x, use_cache=False).logits for x in TOKENS.split(LENGTHS, dim=1)]
        if not has_positions:   # rotary embedding sees differences of positions only
            batch.pop("position_ids")
        got = fused(model, device)(**on(device, batch), use_cache=False).logits
    _close(got, torch.cat(expected, 1))


def attend(device, causal, kwargs, **options):
    """Means of the indexes that each of 12 queries sees."""
    module = torch.nn.Module()
    module.is_causal = causal
    q, k = torch.zeros(1, 2, 12, 8, device=device), torch.ones(1, 2, 12, 8, device=device)
    v = torch.arange(12.0).reshape(1, 1, 12, 1).expand(1, 2, 12, 8).to(device)
    out, weights = integration.attention(module, q, k, v, None, **on(device, kwargs), **options)
    assert weights is None and out.shape == (1, 12, 2, 8)
    return out[0, :, 0, 0].tolist()


def test_IN_08_attention_within_boundaries(device):
    assert attend(device, False, KWARGS) == [1.0] * 3 + [5.0] * 5 + [9.5] * 4
    assert attend(device, True, KWARGS) == [
        0, 0.5, 1, 3, 3.5, 4, 4.5, 5, 8, 8.5, 9, 9.5]
    assert attend(device, True, KWARGS, sliding_window=2) == [
        0, 0.5, 1.5, 3, 3.5, 4.5, 5.5, 6.5, 8, 8.5, 9.5, 10.5]
    assert attend(device, True, {"cu_seq_lens_q": CU_SEQLENS, "cu_seq_lens_k": CU_SEQLENS},
                  dropout=1.0) == [0.0] * 12


def test_what_packing_does_not_take_raises(device):
    with pytest.raises(ValueError, match="position_bias is not supported"):
        attend(device, True, KWARGS, position_bias=torch.zeros(1, 2, 12, 12, device=device))
    with pytest.raises(ValueError, match="cu_seq_lens_q is not supported"):
        attend(device, True, {"cu_seq_lens_q": CU_SEQLENS})
    with pytest.raises(ValueError, match="sliding_window=2 hides some of 12 keys"):
        attend(device, False, KWARGS, sliding_window=2)
    with pytest.raises(ValueError, match="seq_idx is not supported"):
        attend(device, True, {"seq_idx": torch.zeros(1, 12, dtype=torch.int32)})


def test_a_mask_that_says_more_stays_a_mask():
    config = _model("llama").config
    config._attn_implementation = integration.NAME
    integration.register()
    embeds = torch.zeros(1, 12, config.hidden_size)
    options = {"position_ids": POSITIONS, "attention_mask": None, "cache": None}
    assert create_causal_mask(config, embeds, **options).tolist() == CU_SEQLENS.tolist()

    def sees_all(batch_idx, head_idx, q_idx, kv_idx):
        return q_idx >= 0

    mask = create_causal_mask(config, embeds, or_mask_function=sees_all, **options)
    assert mask.shape == (1, 1, 12, 12)
    assert mask[0, 0, 0].tolist() == [True] * 3 + [False] * 9
