"""Sliding windows of `attn_implementation="metal_fused"`: without a mask wherever the op's options
say the same, with one elsewhere.
"""

import pytest
import torch
from tiny_models import tiny
from torch import nn
from transformers import DynamicCache, Llama4TextConfig, StaticCache
from transformers.masking_utils import (
    chunked_causal_mask_function,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from torch_flash_mps.integrations import transformers as integration

WINDOW = 4


class _Layer(nn.Module):
    def __init__(self, is_causal=True, **attributes):
        super().__init__()
        self.is_causal = is_causal
        self.__dict__ |= attributes


class _Config:
    def __init__(self, **attributes):
        self.__dict__ |= attributes


def _means(layer, seqlen_q, seqlen_k, device, mask=None, **options):
    """Mean of the key indexes that each query sees."""
    query = torch.zeros(1, 2, seqlen_q, 8, device=device)
    key = torch.ones(1, 1, seqlen_k, 8, device=device)
    value = torch.arange(float(seqlen_k), device=device)[:, None].expand(1, 1, seqlen_k, 8)
    out, _ = integration.attention(layer, query, key, value, mask, **options)
    return [round(mean, 5) for mean in out[0, :, 0, 0].tolist()]


# Token i sees min(i + 1, 4) keys, the last of them its own.
RAMP = [0.0, 0.5, 1.0, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5]


def test_IN_03_a_token_sees_its_window(device):
    assert _means(_Layer(), 10, 10, device, sliding_window=WINDOW) == RAMP
    assert _means(_Layer(), 3, 3, device, sliding_window=1) == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("seqlen_k", [1, 3, 4, 5, 10])
def test_IN_03_the_newest_token_sees_its_window(device, seqlen_k):
    means = _means(_Layer(), 1, seqlen_k, device, sliding_window=WINDOW)
    assert means == [RAMP[seqlen_k - 1]]


def test_IN_03_a_mask_says_everything(device):
    mask = torch.ones(1, 1, 10, 10, dtype=torch.bool, device=device)
    assert _means(_Layer(), 10, 10, device, mask, sliding_window=WINDOW) == [4.5] * 10


def test_IN_05_a_window_to_both_sides_needs_a_mask(device):
    assert _means(_Layer(False), 4, 4, device, sliding_window=WINDOW) == [1.5] * 4
    with pytest.raises(ValueError, match="sliding_window=4 hides some of 5 keys"):
        _means(_Layer(False), 5, 5, device, sliding_window=WINDOW)


def test_IN_03_the_layer_tells_where_the_model_does_not(device):
    configured = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
    full = [i / 2 for i in range(10)]
    for layer, expected in (
        (_Layer(sliding_window=WINDOW), RAMP),
        (_Layer(config=_Config(sliding_window=None)), full),
        (_Layer(config=_Config(**configured), layer_idx=0), RAMP),
        (_Layer(config=_Config(**configured), layer_idx=1), full),
    ):
        assert _means(layer, 10, 10, device) == expected
    layer = _Layer(sliding_window=WINDOW, config=_Config(**configured), layer_idx=0)
    assert _means(layer, 10, 10, device, sliding_window=None) == full


def test_IN_03_a_layer_that_may_have_a_window_or_not_is_refused(device):
    layer = _Layer(config=_Config(sliding_window=WINDOW))
    assert _means(layer, 4, 4, device) == RAMP[:4]
    with pytest.raises(ValueError, match="sliding_window=4, but a layer with 5 keys"):
        _means(layer, 5, 5, device)


def _mask(mask_function=None, **options):
    defaults = {"batch_size": 2, "q_length": 8, "kv_length": 8, "q_offset": 0, "kv_offset": 0,
                "local_size": WINDOW}
    return integration.attention_mask(
        mask_function=mask_function or sliding_window_causal_mask_function(WINDOW),
        **(defaults | options),
    )


def test_the_mask_of_a_window_is_left_out():
    assert _mask() is None
    assert _mask(attention_mask=torch.ones(2, 8, dtype=torch.bool)) is None
    assert _mask(q_length=1, q_offset=7) is None
    # A full cache of a layer: its 3 newest keys and that of the query.
    assert _mask(q_length=1, q_offset=20, kv_length=4, kv_offset=17) is None
    padded_before = torch.ones(2, 21, dtype=torch.bool)
    padded_before[0, :17] = False
    of_cache = {"q_length": 1, "q_offset": 20, "kv_length": 4, "kv_offset": 17}
    assert _mask(**of_cache, attention_mask=padded_before) is None


def test_the_mask_of_a_window_is_made_where_the_op_could_not_say_it():
    padded = torch.ones(2, 8, dtype=torch.bool)
    padded[0, :2] = False
    for options in (
        {"allow_is_causal_skip": False},
        {"attention_mask": padded},
        {"q_length": 3, "q_offset": 5},
        {"local_size": 3},
        {"mask_function": chunked_causal_mask_function(WINDOW, torch.zeros(2, dtype=torch.int64))},
        {"mask_function": sliding_window_bidirectional_mask_function(WINDOW)},
        {"mask_function": lambda *indexes: sliding_window_causal_mask_function(WINDOW)(*indexes)},
    ):
        mask = _mask(**options)
        assert mask.dtype == torch.bool and mask.shape[-1] == 8, options
        assert not mask.all()


def _of_model(make, config, seqlen, cache=None, **options):
    config._attn_implementation = integration.NAME
    integration.register()
    embeds = torch.zeros(1, seqlen, config.hidden_size)
    return make(config, embeds, options.pop("attention_mask", None), cache, **options)


def test_the_masks_that_models_ask_for():
    config = tiny("mistral", num_key_value_heads=2, sliding_window=WINDOW).config
    make = create_sliding_window_causal_mask
    assert _of_model(make, config, 9) is None
    assert _of_model(make, config, 9, DynamicCache(config=config)) is None
    assert _of_model(make, config, 9, attention_mask=torch.ones(1, 9)) is None
    packed = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
    assert _of_model(make, config, 9, position_ids=packed).tolist() == [0, 5, 9]   # boundaries
    padded = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]])
    assert _of_model(make, config, 9, attention_mask=padded)[0, 0, 4].tolist() == (
        [False] * 2 + [True] * 3 + [False] * 4
    )
    static = StaticCache(config=config, max_cache_len=16)
    assert _of_model(make, config, 1, static).shape == (1, 1, 1, WINDOW)


def test_chunks_are_not_windows():
    config = Llama4TextConfig(hidden_size=48, attention_chunk_size=WINDOW)
    mask = _of_model(create_chunked_causal_mask, config, 9)
    assert mask[0, 0, 4].tolist() == [False] * 4 + [True] + [False] * 4
