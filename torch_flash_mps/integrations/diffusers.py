"""Hugging Face diffusers: `model.set_attention_backend("metal_fused")`.

diffusers has two kinds of attention layers. The newer ones (Flux, Wan, …) look the model's backend
up in a registry; `register` adds ours. The older ones (the UNet and the VAE of Stable Diffusion,
DiT, Stable Diffusion 3, …) call `F.scaled_dot_product_attention`, and diffusers' own backends pass
them by without a word. For ours, their processors learn to heed the backend too, and a model with a
layer that cannot is refused.
"""

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

NAME = "metal_fused"

_SDPA = "scaled_dot_product_attention"
# Other ways in which a processor computes attention.
_OTHER_WAYS = {"get_attention_scores", "memory_efficient_attention"}


def register() -> None:
    """Makes the attention backend "metal_fused" known to diffusers. May be called repeatedly.

    From then on `model.set_attention_backend("metal_fused")` raises a ValueError for a model with
    an attention layer that it cannot reach.

    Example::

        from diffusers import DiffusionPipeline
        from torch_flash_mps.integrations.diffusers import register

        register()
        pipeline = DiffusionPipeline.from_pretrained(path).to("mps")
        pipeline.unet.set_attention_backend("metal_fused")   # or pipeline.transformer, pipeline.vae
    """
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
    from diffusers.models.modeling_utils import ModelMixin

    import torch_flash_mps  # noqa: F401, loads the op

    if NAME not in AttentionBackendName._value2member_map_:
        _add_name(AttentionBackendName)
        method = _reaching(ModelMixin.set_attention_backend)
        setattr(ModelMixin, method.__name__, method)
    backend = AttentionBackendName(NAME)
    _AttentionBackendRegistry.register(backend)(attention)
    named = _AttentionBackendRegistry._supported_arg_names
    named[backend] = _EveryName(named[backend])


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **kwargs: Any,
) -> Tensor:
    """The attention function of a diffusers backend on `torch.ops.flash_mps.attention`.

    Args:
        query: `[batch, seqlen_q, num_heads_q, head_dim]`.
        key: `[batch, seqlen_k, num_heads_kv, head_dim]`.
        value: `[batch, seqlen_k, num_heads_kv, head_dim_v]`.
        attn_mask: bool (True = visible) or float, broadcastable to
            `[batch, num_heads_q, seqlen_q, seqlen_k]`; or, as diffusers' native backend has it,
            `[batch, seqlen_k]`: the keys of each sequence.
        dropout_p, is_causal, scale, enable_gqa: as `torch_flash_mps.attention`.

    Returns:
        `[batch, seqlen_q, num_heads_q, head_dim_v]`.

    Raises:
        ValueError: for an argument that would change the result and is not supported.
    """
    for name, given in kwargs.items():
        if given is not None and given is not False:
            raise ValueError(
                f"{NAME}: {name} is not supported; expected None, got {type(given).__name__}. "
                'Use the backend "native" for it'
            )
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]
    out = torch.ops.flash_mps.attention(
        *(x.transpose(1, 2) for x in (query, key, value)), attn_mask, dropout_p, is_causal,
        scale=scale, enable_gqa=enable_gqa,
    )
    return out.transpose(1, 2)


class _EveryName(set):
    """The names of a backend's arguments, and all others: diffusers would drop those in silence."""

    def __contains__(self, name: object) -> bool:
        return True


def _add_name(names: Any) -> None:
    """One more member of the enumeration without which diffusers takes no backend."""
    member = str.__new__(names, NAME)
    member._name_, member._value_ = NAME.upper(), NAME
    setattr(names, NAME.upper(), member)
    names._member_names_.append(NAME.upper())
    names._member_map_[NAME.upper()] = member
    names._value2member_map_[NAME] = member


def _reaching(method: Callable) -> Callable:
    """`ModelMixin.set_attention_backend` that leaves no layer out where the backend is ours."""

    @wraps(method)
    def set_attention_backend(model: nn.Module, backend: str) -> None:
        if backend.lower() == NAME:
            _reach_layers(model)
        method(model, backend)

    return set_attention_backend


def _reach_layers(model: nn.Module) -> None:
    from diffusers.models.attention import AttentionModuleMixin
    from diffusers.models.attention_processor import Attention, MochiAttention

    takes_backend = (Attention, MochiAttention, AttentionModuleMixin)
    processors: list[Any] = []
    for name, module in model.named_modules():
        processor: Any = getattr(module, "processor", None)
        if _SDPA in _names_called(module.__class__):
            raise _unreachable(model, name, f"{type(module).__name__} calls F.{_SDPA}")
        calls = _names_called(processor.__class__)
        if calls & _OTHER_WAYS:
            raise _unreachable(model, name, f"{type(processor).__name__} multiplies matrices")
        if _SDPA in calls:
            if not isinstance(module, takes_backend):
                raise _unreachable(model, name, f"{type(module).__name__} takes no backend")
            processors.append(processor)
    for processor in processors:
        processor.__class__ = _heeding(processor.__class__)


def _unreachable(model: nn.Module, layer: str, reason: str) -> ValueError:
    return ValueError(
        f"{NAME}: {type(model).__name__} has a layer that no attention backend reaches: {reason} "
        f"in {layer}. Use torch_flash_mps.enable_sdpa() for layers that call F.{_SDPA}"
    )


@cache
def _names_called(of: Any) -> frozenset[str]:
    """The names that the methods of a class refer to."""
    methods = (inspect.unwrap(x) for base in of.__mro__ for x in vars(base).values()
               if inspect.isfunction(x))
    return frozenset(name for method in methods for name in method.__code__.co_names)


@cache
def _heeding(processor_class: Any) -> Any:
    """A processor that calls `F.scaled_dot_product_attention`, and our op where that is chosen."""
    if hasattr(processor_class, "_heeds_backend"):
        return processor_class
    method = processor_class.__call__

    @wraps(method)   # diffusers passes the arguments that the signature names
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._attention_backend != NAME:
            return method(self, *args, **kwargs)
        with _FusedSdpa():
            return method(self, *args, **kwargs)

    attributes = {"__call__": call, "_attention_backend": None, "_heeds_backend": True}
    return type(processor_class.__name__, (processor_class,), attributes)


class _FusedSdpa(TorchFunctionMode):
    """Within it `F.scaled_dot_product_attention` is our op, which raises for what it does not take.
    """

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            func = torch.ops.flash_mps.attention
        return func(*args, **(kwargs or {}))
