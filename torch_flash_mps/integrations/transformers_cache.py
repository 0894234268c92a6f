"""An 8-bit KV cache for Hugging Face transformers, read by the kernel as it is.

Needs transformers 5.4 or later. Up to 5.22 the `cache` argument of models is `past_key_values`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

import torch_flash_mps  # noqa: F401, loads the ops

from .transformers import NAME, Int8States

_FIRST_CAPACITY = 64   # tokens; doubled whenever they are used up
_LAYER_TYPES = {"full_attention", "sliding_attention"}


class Int8Cache(Cache):
    """Keys and values as int8 with one float32 scale per token and head, as `quantize_kv` makes.

    Against a float16 cache it takes (head_dim + 4) / (2 head_dim) of the memory and of what a
    decode step reads. The prompt's own pass sees its keys and values as they are, every later pass
    those of the cache.

    With `attn_implementation="metal_fused"` the kernel dequantises in its registers. Any other
    attention function is given dequantised tensors, in the dtype of the new states: slower, but the
    same cache. Layers with a sliding window keep all tokens; those outside it are not read.

    Args:
        config: the model's. Its attention implementation may be changed later.

    Raises:
        ValueError: for a model with layers that are neither full nor sliding-window attention.

    Example::

        from torch_flash_mps.integrations.transformers_cache import Int8Cache

        model.generate(**inputs, cache=Int8Cache(model.config))
    """

    def __init__(self, config: Any) -> None:
        config = config.get_text_config(decoder=True)
        others = set(getattr(config, "layer_types", None) or []) - _LAYER_TYPES
        if others:
            raise ValueError(
                f"Int8Cache: expected layers of the types {sorted(_LAYER_TYPES)}, "
                f"got {sorted(others)}"
            )
        super().__init__(layers=[Int8Layer(config) for _ in range(config.num_hidden_layers)])


class Int8Layer(DynamicLayer):
    """The part of an `Int8Cache` that one attention layer sees."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.cumulative_length = 0
        # Keys, values, scale of the keys, scale of the values. In all of them tokens are dim 2, of
        # which the first `cumulative_length` are in use.
        self._tensors: list[Tensor] = []

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device = key_states.device
        sizes = [(*x.shape[:2], _FIRST_CAPACITY, x.shape[3]) for x in (key_states, value_states)]
        self._tensors = [
            torch.empty(size, dtype=torch.int8, device=self.device) for size in sizes
        ] + [
            torch.empty(size[:3], dtype=torch.float32, device=self.device) for size in sizes
        ]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Appends the states of new tokens.

        Args:
            key_states: `[batch, num_heads_kv, seqlen_new, head_dim]`.
            value_states: `[batch, num_heads_kv, seqlen_new, head_dim_v]`.

        Returns:
            What attention shall see: the arguments, where the cache was empty; else the whole
            cache, as `Int8States` or as dequantised tensors (see `Int8Cache`).
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.cumulative_length
        self.cumulative_length += key_states.shape[-2]
        self._reserve(self.cumulative_length)
        keys, values, k_scale, v_scale = self._tensors
        torch.ops.flash_mps.kvcache_append_(
            keys, values, key_states, value_states,
            k_scale=k_scale, v_scale=v_scale, position=start,
        )
        if start == 0:
            return key_states, value_states
        keys, values, k_scale, v_scale = (x[:, :, : self.cumulative_length] for x in self._tensors)
        cached = Int8States(keys, k_scale), Int8States(values, v_scale)
        if self.config._attn_implementation == NAME:
            return cached
        return cached[0].dequantize(key_states.dtype), cached[1].dequantize(value_states.dtype)

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def reset(self) -> None:
        self.cumulative_length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens. `tokens_to_remove`: their number, negative, as in transformers.
        """
        if not -self.cumulative_length <= tokens_to_remove <= 0:
            raise ValueError(
                f"Int8Cache.crop: expected minus the number of tokens to remove, at most "
                f"{self.cumulative_length} of them, got {tokens_to_remove}"
            )
        self.cumulative_length += tokens_to_remove

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._replace(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._replace(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._replace(lambda x: x[indices])

    def _reserve(self, length: int) -> None:
        capacity = self._tensors[0].shape[2]
        if length > capacity:
            extra = max(length, 2 * capacity) - capacity
            self._replace(
                lambda x: torch.cat([x, x.new_empty(*x.shape[:2], extra, *x.shape[3:])], dim=2)
            )

    def _replace(self, change: Callable[[Tensor], Tensor]) -> None:
        self._tensors = [change(x) for x in self._tensors]
