"""Exact fused attention for PyTorch on Apple GPUs.

Importing this package registers ``torch.ops.flash_mps``; it changes nothing else in torch and never
fails for want of a GPU: :func:`is_available` and :func:`unavailable_reason` say what is missing.
"""

from importlib.metadata import version as _version

from torch_flash_mps import flash_attn
from torch_flash_mps._extension import is_available, unavailable_reason
from torch_flash_mps.flex import flex_attention
from torch_flash_mps.interface import attention, explain, merge_states
from torch_flash_mps.kv_cache import quantize_kv
from torch_flash_mps.sdpa import (
    disable_sdpa,
    enable_sdpa,
    register_implementation,
    sdpa_enabled,
)
from torch_flash_mps.varlen import attention_varlen

__version__ = _version("torch_flash_mps")

__all__ = ["attention", "attention_varlen", "disable_sdpa", "enable_sdpa", "explain", "flash_attn",
           "flex_attention", "is_available", "merge_states", "quantize_kv", "sdpa_enabled",
           "unavailable_reason", "__version__"]

register_implementation()
