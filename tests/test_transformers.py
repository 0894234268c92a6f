"""`attn_implementation="metal_fused"`: tiny random models against transformers' own eager code."""

import math

import pytest
import torch
from tiny_models import fused, tiny
from torch import nn
from transformers.masking_utils import and_masks, causal_mask_function, create_causal_mask

from torch_flash_mps.integrations import transformers as integration


def _largest_difference(model, device, field="logits", **inputs):
    with torch.no_grad():
        expected = getattr(model(**inputs), field)
        moved = {name: x.to(device) if torch.is_tensor(x) else x for name, x in inputs.items()}
        got = getattr(fused(model, device)(**moved), field)
    return (got.cpu() - expected).abs().max().item()


TOKENS = torch.arange(2 * 9).reshape(2, 9) % 97
PADDED_LEFT = torch.tensor([[0] * 4 + [1] * 5, [1] * 9])


@pytest.mark.parametrize("mask", [None, PADDED_LEFT], ids=["dense", "left-padded"])
def test_decoder_equals_eager(device, mask):
    model = tiny("llama", num_key_value_heads=2)
    with torch.no_grad():
        expected = model(TOKENS, attention_mask=mask).logits
        mask_there = None if mask is None else mask.to(device)
        got = fused(model, device)(TOKENS.to(device), attention_mask=mask_there).logits
    seen = slice(None) if mask is None else mask.bool()
    torch.testing.assert_close(got.cpu()[seen], expected[seen], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
def test_IN_05_encoder_sees_both_sides(device, padded):
    mask = PADDED_LEFT.flip(1) if padded else torch.ones_like(TOKENS)
    model = tiny("bert")
    assert _largest_difference(
        model, device, "last_hidden_state", input_ids=TOKENS, attention_mask=mask
    ) < 1e-4


def test_IN_05_encoder_decoder_with_cross_attention(device):
    model = tiny(
        "bart", d_model=48, encoder_layers=1, decoder_layers=1, encoder_attention_heads=6,
        decoder_attention_heads=6, encoder_ffn_dim=64, decoder_ffn_dim=64, pad_token_id=0,
        decoder_start_token_id=1, forced_eos_token_id=None,
    )
    difference = _largest_difference(
        model, device, input_ids=TOKENS + 1, decoder_input_ids=TOKENS[:, :5] + 1
    )
    assert difference < 1e-4


def _attention(module, seqlen_q, seqlen_k, device, mask=None, **options):
    """Mean of the key indexes that each query sees (head_dim 8, 2 query heads on 1)."""
    query = torch.zeros(1, 2, seqlen_q, 8, device=device)
    key = torch.ones(1, 1, seqlen_k, 8, device=device)
    value = torch.arange(float(seqlen_k), device=device)[:, None].expand(1, 1, seqlen_k, 8)
    out, weights = integration.attention(module, query, key, value, mask, **options)
    assert weights is None
    assert out.shape == (1, seqlen_q, 2, 8) and out.is_contiguous()
    return [round(mean, 5) for mean in out[0, :, 0, 0].tolist()]


class _Layer(nn.Module):
    def __init__(self, is_causal):
        super().__init__()
        self.is_causal = is_causal


def test_IN_05_one_query_sees_all_keys(device):
    assert _attention(_Layer(True), 1, 9, device) == [4.0]


def test_IN_05_causal_prefill_and_encoder(device):
    assert _attention(_Layer(True), 3, 3, device) == [0.0, 0.5, 1.0]
    assert _attention(_Layer(False), 3, 3, device) == [1.0] * 3


def test_IN_05_cross_attention_is_not_causal(device):
    assert _attention(_Layer(False), 5, 9, device) == [4.0] * 5
    assert _attention(_Layer(True), 5, 9, device, is_causal=False) == [4.0] * 5


def test_IN_05_causal_with_more_keys_than_queries_needs_a_mask(device):
    with pytest.raises(ValueError, match="5 queries and 9 keys needs an attention_mask"):
        _attention(_Layer(True), 5, 9, device)
    mask = torch.ones(5, 9, dtype=torch.bool, device=device).tril(4)
    assert _attention(_Layer(True), 5, 9, device, mask) == [2.0, 2.5, 3.0, 3.5, 4.0]


def test_chunked_prefill_with_a_cache_equals_one_pass(device):
    model = fused(tiny("llama", num_key_value_heads=2), device)
    tokens = TOKENS.to(device)
    with torch.no_grad():
        whole = model(tokens).logits
        first = model(tokens[:, :4], use_cache=True)
        rest = model(tokens[:, 4:], cache=first.past_key_values).logits
    torch.testing.assert_close(rest.cpu(), whole[:, 4:].cpu(), rtol=1e-4, atol=1e-5)


def test_IN_04_scaling_reaches_the_kernel(device):
    query = torch.tensor([[1.0, 0.0]], device=device).reshape(1, 1, 1, 2)
    key = torch.eye(2, device=device).reshape(1, 1, 2, 2)
    out, _ = integration.attention(_Layer(False), query, key, key, None, scaling=3.0)
    expected = torch.softmax(torch.tensor([3.0, 0.0]), 0)
    torch.testing.assert_close(out.flatten().cpu(), expected)


def test_IN_04_softcap_and_sinks_reach_the_kernel(device):
    query = torch.tensor([[1.0, 0.0]], device=device).reshape(1, 1, 1, 2)
    key = torch.eye(2, device=device).reshape(1, 1, 2, 2)
    out, _ = integration.attention(
        _Layer(False), query, key, key, None, scaling=3.0, softcap=2.0,
        s_aux=torch.tensor([0.5], device=device),
    )
    scores = torch.tensor([2 * math.tanh(1.5), 0.0, 0.5])
    torch.testing.assert_close(out.flatten().cpu(), torch.softmax(scores, 0)[:2])


def test_IN_04_dropout_reaches_the_kernel(device):
    assert _attention(_Layer(True), 3, 3, device, dropout=1.0) == [0, 0, 0]


def test_IN_04_arguments_of_the_loss_pass_by(device):
    inputs = {"input_ids": TOKENS, "labels": TOKENS, "shift_labels": TOKENS.flip(1),
              "num_items_in_batch": torch.tensor(18)}
    assert _largest_difference(tiny("llama"), device, "loss", **inputs) < 1e-5


def test_IN_04_the_form_of_the_output_passes_by(device):
    """HuBERT hands `return_dict` down to its attention layers."""
    model = tiny("hubert", conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3),
                 num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2)
    sound = torch.linspace(-1, 1, 200).sin().expand(2, 200)
    assert _largest_difference(model, device, "last_hidden_state", input_values=sound) < 1e-4


def test_IN_04_position_bias_reaches_the_kernel(device):
    """With a causal layer, a bool mask and a float mask: each hides keys of its own."""
    bias = torch.full((1, 2, 3, 3), 2.0, device=device)
    bias[..., 1] = -torch.inf
    mask = torch.tensor([True, True, False], device=device).expand(1, 1, 3, 3)
    layer = _Layer(True)
    assert _attention(layer, 3, 3, device, position_bias=bias) == [0.0, 0.0, 1.0]
    assert _attention(layer, 3, 3, device, mask, position_bias=bias) == [0.0] * 3
    ones = torch.where(mask, 1.0, -torch.inf)
    assert _attention(layer, 3, 3, device, ones, position_bias=bias) == [0.0] * 3
    assert _attention(layer, 1, 3, device, position_bias=bias[:, :, :1]) == [1.0]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("sinks", torch.zeros(1, 2, 3, 1)),   # of Inkling: one for each query
        ("head_mask", torch.ones(2)),
        ("indices", torch.zeros(3)),
        ("cu_seq_lens_q", torch.tensor([0, 1, 3])),
        ("something_new", 1),
    ],
)
def test_IN_04_an_unknown_argument_is_never_ignored(device, name, given):
    assert _attention(_Layer(True), 3, 3, device, **{name: None}) == [0.0, 0.5, 1.0]
    with pytest.raises(ValueError, match=f"metal_fused: {name} is not supported"):
        _attention(_Layer(True), 3, 3, device, **{name: given})


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(24, 16), (256, 256), (512, 512)])
def test_IN_06_head_dims_of_other_models(device, head_dim, head_dim_v):
    seqlen = 20   # more than the decode kernel takes
    q, k, v = (torch.randn(1, 2, seqlen, d) for d in (head_dim, head_dim, head_dim_v))
    out, _ = integration.attention(_Layer(True), *(x.to(device) for x in (q, k, v)), None)
    assert out.shape == (1, seqlen, 2, head_dim_v)
    expected = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out.cpu(), expected.transpose(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_IN_07_output_attentions_raises(device, name):
    model = fused(tiny(name), device)
    with torch.no_grad(), pytest.raises(ValueError, match="output_attentions is not supported"):
        model(TOKENS.to(device), output_attentions=True)


def test_IN_08_packed_sequences_do_not_see_each_other(device):
    lengths = (3, 5, 4)
    tokens = torch.arange(12)[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    model = fused(tiny("llama", num_key_value_heads=2), device)
    with torch.no_grad():
        packed = model(
            tokens.to(device), position_ids=positions.to(device), use_cache=False
        ).logits
        apart = [model(x.to(device)).logits for x in tokens.split(lengths, dim=1)]
    torch.testing.assert_close(packed.cpu(), torch.cat(apart, 1).cpu(), rtol=1e-4, atol=1e-5)


def _mask(**options):
    defaults = {"batch_size": 2, "q_length": 4, "kv_length": 4, "q_offset": 0, "kv_offset": 0}
    return integration.attention_mask(**(defaults | options))


def test_mask_is_left_out_only_where_the_op_needs_none():
    padded = torch.tensor([[False, True, True, True], [True] * 4])
    assert _mask() is None
    assert _mask(attention_mask=torch.ones(2, 4, dtype=torch.bool)) is None
    assert _mask(q_length=1, q_offset=3) is None
    assert _mask(allow_is_causal_skip=False).shape == (2, 1, 4, 4)
    assert _mask(attention_mask=padded)[0, 0].tolist() == [
        [False, False, False, False],
        [False, True, False, False],
        [False, True, True, False],
        [False, True, True, True],
    ]
    assert _mask(q_length=2, q_offset=2)[1, 0].tolist() == [[True] * 3 + [False], [True] * 4]


def test_mask_of_an_empty_static_cache_is_explicit():
    mask = _mask(q_length=3, kv_length=8, attention_mask=torch.ones(2, 3, dtype=torch.bool))
    assert mask[0, 0].tolist() == torch.ones(3, 8, dtype=torch.bool).tril().tolist()


def test_mask_takes_no_memory_for_what_it_does_not_depend_on():
    def by_key(batch_idx, head_idx, q_idx, kv_idx):
        return kv_idx > 1

    mask = _mask(mask_function=by_key, allow_is_causal_skip=False, kv_length=6)
    assert mask.shape == (2, 1, 4, 6)
    assert mask.untyped_storage().nbytes() == 6
    both = and_masks(by_key, causal_mask_function)
    causal = _mask(mask_function=both, allow_is_causal_skip=False)
    assert causal.untyped_storage().nbytes() == 4 * 4


def test_a_four_dimensional_mask_is_used_as_it_is(device):
    mask = torch.zeros(1, 1, 3, 3, device=device)
    mask[..., 0] = -torch.inf
    assert _attention(_Layer(True), 3, 3, device, mask) == [1.5] * 3


def test_the_mask_function_is_the_one_that_models_use():
    config = tiny("llama").config
    integration.register()
    config._attn_implementation = integration.NAME
    embeds = torch.zeros(1, 4, 48)
    padding = torch.tensor([[0, 1, 1, 1]])
    mask = create_causal_mask(config, embeds, padding, None)
    assert mask.dtype == torch.bool and mask.shape == (1, 1, 4, 4)
    assert not mask[..., 0].any()
