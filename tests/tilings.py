"""The tiling table as test parameters."""

import pytest
from cases import DTYPE_NAMES, DTYPES

from torch_flash_mps._extension import extension


def tilings(*ops: str) -> list[dict]:
    """The table's rows for some kernels."""
    return [row for row in extension().tilings() if row["op"] in ops]


def tiling_cases(*ops: str) -> list:
    """Each row with each dtype of its size."""
    return [
        pytest.param(
            row, dtype,
            id=f"{row['op']}-{row['family']}-d{row['max_head_dim']}-{DTYPE_NAMES[dtype]}",
        )
        for row in tilings(*ops)
        for dtype in DTYPES
        if dtype.itemsize == row["element_bytes"]
    ]
