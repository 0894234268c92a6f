"""Hugging Face transformers: `attn_implementation="metal_fused"`.

transformers keeps two registries, one of attention functions and one of functions that build the
mask for them; a name that is missing from the second silently gets no mask at all, so `register`
fills both. The name must not contain "flash": transformers takes every such name for a CUDA
package. Needs transformers 5.4 or later, whose mask functions receive lengths and offsets.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .transformers_models import refuse_unreachable
from .transformers_packed import boundaries, find_packing, meaning

NAME = "metal_fused"

# What models hand down to every attention function and what changes nothing in its result.
_IRRELEVANT = {
    "cache_position",
    "deterministic",
    "ignore_index",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "shift_labels",
    "use_cache",
}

# Boundaries of packed sequences, which `find_packing` reads; a mask already holds them. Without
# either they would be lost.
_PACKED = {"cu_seq_lens_k", "cu_seq_lens_q", "max_length_k", "max_length_q", "seq_idx"}

_OF_LAYER = -1   # a sliding_window that the model did not pass


@dataclass(frozen=True)
class Int8States:
    """Keys or values of one layer as 8-bit integers, where models expect a tensor.

    What `transformers_cache.Int8Cache` hands to `attention`, which passes both tensors to the
    kernel as they are.

    Attributes:
        data: int8 `[batch, num_heads_kv, seqlen_k, head_dim]`.
        scale: float32 `[batch, num_heads_kv, seqlen_k]`; a state is `data * scale`.
    """

    data: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The states as a tensor, multiplied in float32 and rounded once."""
        return (self.data.float() * self.scale.unsqueeze(-1)).to(dtype)


def register() -> None:
    """Makes `attn_implementation="metal_fused"` known to transformers. May be called repeatedly.

    From then on transformers raises a ValueError where that name is given to a model that would not
    call `attention`.

    Example::

        from transformers import AutoModelForCausalLM
        from torch_flash_mps.integrations.transformers import register

        register()
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="metal_fused")
        model.to("mps")
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    import torch_flash_mps  # noqa: F401, loads the op

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, attention_mask)
    refuse_unreachable(NAME)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | Int8States,
    value: Tensor | Int8States,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = _OF_LAYER,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers on `torch.ops.flash_mps.attention`.

    Args:
        module: the attention layer; its `is_causal` counts when the argument is None.
        query: `[batch, num_heads_q, seqlen_q, head_dim]`.
        key: `[batch, num_heads_kv, seqlen_k, head_dim]`; grouped heads are not repeated.
        value: `[batch, num_heads_kv, seqlen_k, head_dim_v]`. Both may be `Int8States`, which the
            kernel dequantises in its registers; without dropout and gradients then.
        attention_mask: bool (True = visible) or float, broadcastable to
            `[batch, num_heads_q, seqlen_q, seqlen_k]`. It says everything, the window too. None in
            a causal layer: the queries are all the keys, or the newest of them. Int32
            `[num_sequences + 1]`: where packed sequences begin and end, as `attention_mask` makes
            it.
        scaling: factor on the scores; None = 1 / sqrt(head_dim).
        softcap: scores become `softcap * tanh(scores / softcap)`; None = off.
        s_aux: `[num_heads_q]`, the sink of each head; differentiable.
        sliding_window: how many keys a query of a causal layer sees, itself included; None = all.
            Where a model does not pass it, what the layer and its config say of it counts.
        kwargs: with `cu_seq_lens_q` and `cu_seq_lens_k`, and without a mask, the rows of the batch
            are packed sequences with these boundaries.
        position_bias: is added to the scores after `scaling`, shaped as `attention_mask`, in
            query's dtype or float32; differentiable.

    Returns:
        `[batch, seqlen_q, num_heads_q, head_dim_v]`, and None in place of the attention weights.

    Raises:
        ValueError: for an argument that would change the result and is not supported.
    """
    packing = find_packing(attention_mask, kwargs)
    _refuse_unsupported(kwargs, knows_packing=packing is not None or attention_mask is not None)
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
    is_band = False   # whether queries see the keys up to their own only, without a mask
    if attention_mask is None or packing is not None:
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        seqlen_q, seqlen_k = query.shape[-2], key.shape[-2]
        window = _window_of(module, seqlen_k) if sliding_window == _OF_LAYER else sliding_window
        # Packed, the last query of a sequence stands at its last key.
        num_new = seqlen_q if packing is None else seqlen_k
        _refuse_maskless(num_new, seqlen_k, window, is_causal=is_causal)
        # One query is the newest token and sees the keys up to the last.
        is_band = is_causal and (seqlen_q > 1 or packing is not None)
        if window is not None and seqlen_k > window:
            options["window_left"] = window - 1
    if packing is not None:
        _refuse_unsupported({"position_bias": position_bias}, knows_packing=True)
        return packing.attend(query, key, value, is_causal=is_band, dropout_p=dropout,
                              **options), None
    attn_mask = _joined(attention_mask, position_bias)
    if isinstance(key, Int8States) and isinstance(value, Int8States):
        _refuse_unsupported({"dropout": dropout or None}, knows_packing=True)
        out, _ = torch.ops.flash_mps.attention_with_kvcache(
            query, key.data, value.data, attn_mask, is_band,
            k_scale=key.scale, v_scale=value.scale, **options,
        )
    else:
        out = torch.ops.flash_mps.attention(
            query, key, value, attn_mask, dropout, is_band,
            enable_gqa=query.shape[1] != key.shape[1], is_bottom_right=True, **options,
        )
    return out.transpose(1, 2).contiguous(), None


def _joined(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """One mask that says what both say."""
    if mask is None or bias is None:
        return bias if mask is None else mask
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else bias + mask


def attention_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable | None = None,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask for `attention`: bool `[batch, 1, q_length, kv_length]`, True = visible.

    None where `attention` needs no mask: a causal layer, with or without a sliding window, whose
    queries are all the keys, or the newest one, and an encoder without padding. A mask that is the
    same for every sequence or every query is expanded by stride, not in memory. For packed
    sequences (position ids that restart) no mask, but their boundaries: int32
    `[num_sequences + 1]`.

    Args:
        q_length, kv_length: how many queries and keys there are.
        mask_function: which pairs are visible, as a function of indexes; None = causal.
        allow_is_causal_skip: whether a causal mask may be left out.
        local_size: the window or chunk that `mask_function` keeps to, None = neither.
        kwargs: the rest of transformers' mask arguments, passed on to its `sdpa_mask`.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    packed = boundaries(mask_function, local_size)
    if packed is not None:
        return packed
    allow_is_causal_skip = allow_is_causal_skip and q_length in (1, kv_length)
    if allow_is_causal_skip and _is_causal_window(mask_function, local_size):
        local_size = None   # sdpa_mask leaves a mask out where nothing is local
    return sdpa_mask(
        q_length=q_length,
        kv_length=kv_length,
        mask_function=mask_function or causal_mask_function,
        allow_is_causal_skip=allow_is_causal_skip,
        local_size=local_size,
        **kwargs,
    )


def _is_causal_window(mask_function: Callable | None, window: int | None) -> bool:
    """Whether the function is transformers' causal sliding window and nothing besides."""
    from transformers.masking_utils import sliding_window_causal_mask_function

    if window is None or torch.compiler.is_compiling():
        return False
    return meaning(mask_function) == meaning(sliding_window_causal_mask_function(window))


def _window_of(layer: nn.Module, seqlen_k: int) -> int | None:
    """The window of a layer whose model does not pass it on."""
    window = getattr(layer, "sliding_window", None)
    config = getattr(layer, "config", None)
    configured = getattr(config, "sliding_window", None)
    if window is not None or configured is None:
        return window
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        is_sliding = layer_types[layer.layer_idx] == "sliding_attention"
        return configured if is_sliding else None
    if seqlen_k > configured:
        raise ValueError(
            f"{NAME}: the config has sliding_window={configured}, but a layer with {seqlen_k} keys "
            "says neither that it has a window nor that it has none; pass sliding_window to the "
            "attention function"
        )
    return None


def _refuse_maskless(
    seqlen_q: int, seqlen_k: int, window: int | None, *, is_causal: bool
) -> None:
    """Raises where only a mask could say what is visible."""
    if not is_causal and window is not None and seqlen_k > window:
        raise ValueError(
            f"{NAME}: sliding_window={window} hides some of {seqlen_k} keys of a layer that is not "
            "causal, but no attention_mask says which; build the mask with "
            "transformers.masking_utils"
        )
    if is_causal and seqlen_q not in (1, seqlen_k):
        raise ValueError(
            f"{NAME}: a causal layer with {seqlen_q} queries and {seqlen_k} keys needs an "
            "attention_mask: without one it is not known where the queries stand among the "
            "keys. Pass is_causal=False if every query sees every key"
        )


def _refuse_unsupported(kwargs: dict[str, Any], *, knows_packing: bool) -> None:
    """Raises for the first keyword that carries something and that nothing here would heed."""
    for name, given in kwargs.items():
        if given is None or given is False or name in _IRRELEVANT:
            continue
        if name in _PACKED and knows_packing:
            continue
        raise ValueError(
            f"{NAME}: {name} is not supported; expected None, got {_short(given)}. "
            'Use attn_implementation="eager" for it'
        )


def _short(given: Any) -> str:
    return f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else repr(given)
