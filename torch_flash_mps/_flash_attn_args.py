"""What the functions of `torch_flash_mps.flash_attn` check alike."""

from __future__ import annotations

from typing import Any

from torch import Tensor

_LAYOUT = (
    "the layout is [batch, seqlen, num_heads, head_dim]; torch_flash_mps.attention takes "
    "[batch, num_heads, seqlen, head_dim]"
)


def score_options(
    window_size: tuple[int, int], softcap: float, alibi_slopes: Tensor | None
) -> dict[str, Any]:
    """The package's options in the words of the ops."""
    left, right = window_size
    return {"window_left": left, "window_right": right, "softcap": softcap,
            "alibi_slopes": alibi_slopes}


def check_layout(name: str, **operands: Tensor) -> None:
    """Raises ValueError unless query, key and value, in this order, fit in rank and heads."""
    names, tensors = list(operands), list(operands.values())
    for operand, tensor in operands.items():
        if tensor.dim() != 4:
            raise ValueError(
                f"{name}: expected {operand} of rank 4, got shape {tuple(tensor.shape)}; {_LAYOUT}"
            )
    heads = [tensor.size(2) for tensor in tensors]
    if heads[1] != heads[2] or heads[1] == 0 or heads[0] % heads[1]:
        raise ValueError(
            f"{name}: expected as many heads in {names[1]} as in {names[2]}, and a multiple of "
            f"them in {names[0]}, got {heads[1]}, {heads[2]} and {heads[0]} "
            f"({names[1]} {tuple(tensors[1].shape)}, {names[0]} {tuple(tensors[0].shape)}); "
            f"{_LAYOUT}"
        )
