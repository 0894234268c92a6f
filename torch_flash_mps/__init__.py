"""Exact fused attention for PyTorch on Apple GPUs.

Importing this package registers ``torch.ops.flash_mps``; it changes nothing else in torch and never
fails for want of a GPU: :func:`is_available` and :func:`unavailable_reason` say what is missing.
"""

from importlib.metadata import version as _version

from torch_flash_mps._extension import is_available, unavailable_reason
from torch_flash_mps.interface import attention, explain

__version__ = _version("torch_flash_mps")

__all__ = ["attention", "explain", "is_available", "unavailable_reason", "__version__"]
