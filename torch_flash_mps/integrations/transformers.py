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

NAME = "metal_fused"

# What models hand down to every attention function and what changes nothing in its result.
_IRRELEVANT = {
    "cache_position",
    "deterministic",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "use_cache",
}

# Boundaries of packed sequences. A mask already holds them; without one they would be lost.
_PACKED = {"cu_seq_lens_k", "cu_seq_lens_q", "max_length_k", "max_length_q", "seq_idx"}


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
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers on `torch.ops.flash_mps.attention`.

    Args:
        module: the attention layer; its `is_causal` counts when the argument is None.
        query: `[batch, num_heads_q, seqlen_q, head_dim]`.
        key: `[batch, num_heads_kv, seqlen_k, head_dim]`; grouped heads are not repeated.
        value: `[batch, num_heads_kv, seqlen_k, head_dim_v]`. Both may be `Int8States`, which the
            kernel dequantises in its registers; without dropout, softcap, s_aux and gradients then.
        attention_mask: bool (True = visible) or float, broadcastable to
            `[batch, num_heads_q, seqlen_q, seqlen_k]`; or None.
        scaling: factor on the scores; None = 1 / sqrt(head_dim).
        softcap, s_aux: passed on as the op's `softcap` and `sinks`.
        sliding_window: only checked; a window that hides keys must be in the mask.

    Returns:
        `[batch, seqlen_q, num_heads_q, head_dim_v]`, and None in place of the attention weights.

    Raises:
        ValueError: for an argument that would change the result and is not supported.
    """
    _refuse_unsupported(kwargs, has_mask=attention_mask is not None)
    seqlen_q, seqlen_k = query.shape[-2], key.shape[-2]
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if attention_mask is None:
        if sliding_window is not None and seqlen_k > sliding_window:
            raise ValueError(
                f"{NAME}: sliding_window={sliding_window} hides some of {seqlen_k} keys, but no "
                "attention_mask says which; build the mask with transformers.masking_utils"
            )
        if is_causal and seqlen_q not in (1, seqlen_k):
            raise ValueError(
                f"{NAME}: a causal layer with {seqlen_q} queries and {seqlen_k} keys needs an "
                "attention_mask: without one it is not known where the queries stand among the "
                "keys. Pass is_causal=False if every query sees every key"
            )
    if isinstance(key, Int8States) and isinstance(value, Int8States):
        refused = {"dropout": dropout or None, "softcap": softcap or None, "s_aux": s_aux}
        _refuse_unsupported(refused, has_mask=True)
        out, _ = torch.ops.flash_mps.attention_with_kvcache(
            query, key.data, value.data, attention_mask,
            scale=scaling, k_scale=key.scale, v_scale=value.scale,
        )
        return out.transpose(1, 2).contiguous(), None
    out = torch.ops.flash_mps.attention(
        query,
        key,
        value,
        attention_mask,
        dropout,
        # One query is the newest token and sees all keys; with a mask, the mask says everything.
        attention_mask is None and seqlen_q > 1 and bool(is_causal),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    return out.transpose(1, 2).contiguous(), None


def attention_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """The mask for `attention`: bool `[batch, 1, q_length, kv_length]`, True = visible.

    None where `attention` needs no mask: a causal layer whose queries are all the keys, or the
    newest one, and an encoder without padding. A mask that is the same for every sequence or every
    query is expanded by stride, not in memory.

    Args:
        q_length, kv_length: how many queries and keys there are.
        mask_function: which pairs are visible, as a function of indexes; None = causal.
        allow_is_causal_skip: whether a causal mask may be left out.
        kwargs: the rest of transformers' mask arguments, passed on to its `sdpa_mask`.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    return sdpa_mask(
        q_length=q_length,
        kv_length=kv_length,
        mask_function=mask_function or causal_mask_function,
        allow_is_causal_skip=allow_is_causal_skip and q_length in (1, kv_length),
        **kwargs,
    )


def _refuse_unsupported(kwargs: dict[str, Any], *, has_mask: bool) -> None:
    """Raises for the first keyword that carries something and that nothing here would heed."""
    for name, given in kwargs.items():
        if given is None or given is False or name in _IRRELEVANT:
            continue
        if name in _PACKED and has_mask:
            continue
        raise ValueError(
            f"{NAME}: {name} is not supported; expected None, got {_short(given)}. "
            'Use attn_implementation="eager" for it'
        )


def _short(given: Any) -> str:
    return f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else repr(given)
