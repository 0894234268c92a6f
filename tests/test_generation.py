"""Generation with every kind of cache: small random models against transformers' own eager code."""

import pytest
import torch
from tiny_models import fused, tiny
from transformers import DynamicCache, StaticCache

from torch_flash_mps.integrations.transformers_cache import Int8Cache

PROMPTS = [[5, 6, 7], [11, 12, 13, 14, 15, 16, 17]]
CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=48),
    "int8": Int8Cache,
}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["f32", "f16"])


def _generate(model, prompts, cache, **options):
    """Greedy: the 8 new tokens of each prompt, in one left-padded batch."""
    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor(
        [[0] * (length - len(p)) + [1] * len(p) for p in prompts], device=model.device
    )
    tokens = model.generate(
        ids, attention_mask=mask, cache=CACHES[cache](model.config), max_new_tokens=8,
        do_sample=False, pad_token_id=0, eos_token_id=None, **options,
    )
    return tokens[:, length:].tolist()


@pytest.mark.parametrize("cache", CACHES)
@DTYPES
def test_IN_02_left_padded_generation_equals_each_prompt_alone(device, cache, dtype):
    model = fused(tiny("llama", num_key_value_heads=2).to(dtype), device)
    alone = [_generate(model, [prompt], cache)[0] for prompt in PROMPTS]
    assert _generate(model, PROMPTS, cache) == alone
    assert len(alone[0]) == 8


def _gemma():
    """Like Gemma 3: one KV head, windows that the prompts outgrow, and a head_dim of its own."""
    return tiny(
        "gemma3", num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=1, head_dim=256,
        query_pre_attn_scalar=256, sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )


@pytest.mark.parametrize("cache", CACHES)
def test_IN_03_sliding_windows_generate_what_eager_does(device, cache):
    model = _gemma()
    expected = _generate(model, PROMPTS, cache)
    assert _generate(fused(model, device), PROMPTS, cache) == expected


@pytest.mark.parametrize("cache", CACHES)
def test_every_step_after_the_first_runs_the_decode_kernel(device, kernels, cache):
    model = fused(tiny("llama", num_key_value_heads=2), device)
    prompt = list(range(40))   # more queries than the decode kernel takes
    kernels()
    _generate(model, [prompt, prompt[3:]], cache)
    attention = [name for name in kernels() if name in ("flash_fwd", "flash_decode")]
    assert attention == ["flash_fwd"] * 2 + ["flash_decode"] * 2 * 7


def test_beam_search_reorders_the_8_bit_cache(device):
    model = tiny("llama", num_key_value_heads=2)
    expected = _generate(model, PROMPTS, "int8", num_beams=3)
    assert _generate(fused(model, device), PROMPTS, "int8", num_beams=3) == expected
