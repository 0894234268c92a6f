"""flex_attention: attention whose scores and visibility the caller defines."""

from torch_flash_mps.flex.function import flex_attention

__all__ = ["flex_attention"]
