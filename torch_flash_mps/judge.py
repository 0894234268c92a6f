"""How a result is judged, by tests, benchmarks and the self-test alike: shape, then NaN and Inf
positions, then the size of the error."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["FLOOR", "check", "check_exact"]

FLOOR = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def check(
    got: Tensor,
    ref: Tensor,
    lowp: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    case_id: str = "",
    slack: float = 0.0,
) -> None:
    """Raises AssertionError unless max|got - ref| <= 2 * max|lowp - ref| + floor of the dtype.

    Args:
        got: the result to judge, any device.
        ref: the float64 oracle, same shape.
        lowp: the same maths in plain torch in the dtype of `got`; None = the floor alone.
        dtype: the dtype that sets the floor; None = that of `got`.
        case_id: printed in front of every message.
        slack: added to the bound.
    """
    got64, ref64 = _comparable(got, ref, case_id)
    bound = FLOOR[dtype or got.dtype] + slack
    if lowp is not None:
        lowp_error = (lowp.detach().cpu().double() - ref64).abs()
        # A plain float16 product that overflowed says nothing about the error allowed to us.
        finite = lowp_error[torch.isfinite(lowp_error)]
        bound += 2 * (finite.max().item() if finite.numel() else 0.0)
    _compare(got64, ref64, bound, case_id)


def check_exact(
    got: Tensor, expected: Tensor | float, tolerance: float = 0.0, case_id: str = ""
) -> None:
    """Raises AssertionError unless every element is within `tolerance` of the stated anchor."""
    expected = torch.as_tensor(expected).detach().cpu().double()
    got64, expected64 = _comparable(got, expected.expand(got.shape), case_id)
    _compare(got64, expected64, tolerance, case_id)


def _comparable(got: Tensor, ref: Tensor, case_id: str) -> tuple[Tensor, Tensor]:
    if got.shape != ref.shape:
        raise AssertionError(
            f"{case_id}: expected shape {tuple(ref.shape)}, got {tuple(got.shape)}"
        )
    return got.detach().cpu().double(), ref.detach().cpu().double()


def _compare(got: Tensor, ref: Tensor, bound: float, case_id: str) -> None:
    kinds = (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf))
    for kind, test in kinds:
        wrong = test(got) != test(ref)
        if wrong.any():
            worst = _first(wrong)
            raise AssertionError(
                f"{case_id}: {int(wrong.sum())} of {wrong.numel()} elements differ in {kind}, the "
                f"first at {worst}: expected {ref[worst].item()}, got {got[worst].item()}"
            )
    error = torch.where(torch.isfinite(ref), (got - ref).abs(), 0.0)
    if error.numel() and error.max().item() > bound:
        worst = _first(error == error.max())
        raise AssertionError(
            f"{case_id}: error {error[worst].item():.3e} exceeds {bound:.3e} at {worst}: expected "
            f"{ref[worst].item()!r}, got {got[worst].item()!r}; "
            f"{int((error > bound).sum())} of {error.numel()} elements are off"
        )


def _first(where: Tensor) -> tuple[int, ...]:
    return tuple(where.nonzero()[0].tolist())
