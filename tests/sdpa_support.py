"""What the tests of `enable_sdpa` share."""

import torch
from torch import Tensor

SDPA = "aten::scaled_dot_product_attention"


def dispatch_tables() -> tuple[str, str]:
    """What PyTorch's dispatcher runs for scaled_dot_product_attention, registered and computed."""
    return torch._C._dispatch_dump(SDPA), torch._C._dispatch_dump_table(SDPA)


def inputs(device, *shape: int, requires_grad: bool = False) -> list[Tensor]:
    """Random q, k, v, by default of two sequences, three heads, 17 tokens and head_dim 16."""
    shape = shape or (2, 3, 17, 16)
    return [torch.randn(shape).to(device).requires_grad_(requires_grad) for _ in range(3)]


def close(got: Tensor, expected: Tensor, atol: float = 2e-6, rtol: float = 2e-5) -> None:
    torch.testing.assert_close(got.cpu(), expected.cpu(), atol=atol, rtol=rtol)
