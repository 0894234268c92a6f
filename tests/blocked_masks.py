"""Masks whose blocks are of all classes."""

import math

import torch
from torch import Tensor

BLOCK = 32
HIDDEN, MIXED, OPEN = 0, 1, 2


def blocked_mask(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Blocks of all three classes, in every plane others: as bool, or as what is added."""
    generator = torch.Generator().manual_seed(3)
    *planes, rows, columns = shape
    sizes = (*planes, -(-rows // BLOCK), -(-columns // BLOCK))
    classes = torch.randint(3, sizes, generator=generator)
    classes[..., 0] = OPEN   # every row sees a key
    wide = classes.repeat_interleave(BLOCK, -2)[..., :rows, :]
    wide = wide.repeat_interleave(BLOCK, -1)[..., :columns]
    noise = torch.randn(shape, generator=generator)
    visible = (wide == OPEN) | ((wide == MIXED) & (noise > 0))
    if dtype == torch.bool:
        return visible
    return (noise * (wide == MIXED)).masked_fill(~visible, -math.inf).to(dtype)
