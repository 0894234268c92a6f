"""How a result is judged: shape, then NaN and Inf positions, then the size of the error."""

import math

import torch
from cases import Case, make_inputs
from torch import Tensor

import torch_flash_mps
from torch_flash_mps.reference import attention_ref, dropout_factors, visible_pairs

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


def check_exact(got: Tensor, expected: Tensor | float, tolerance: float = 0.0, case_id: str = ""):
    """Raises AssertionError unless every element is within `tolerance` of the stated anchor."""
    expected = torch.as_tensor(expected).detach().cpu().double()
    got64, expected64 = _comparable(got, expected.expand(got.shape), case_id)
    _compare(got64, expected64, tolerance, case_id)


def check_same_bits(got: Tensor, other: Tensor, case_id: str = "") -> None:
    """Raises AssertionError unless both tensors hold the same bytes (NaN equals the same NaN)."""
    assert got.dtype == other.dtype, f"{case_id}: expected {other.dtype}, got {got.dtype}"
    assert got.shape == other.shape, f"{case_id}: expected {other.shape}, got {got.shape}"
    a, b = (x.detach().cpu().contiguous().view(torch.uint8) for x in (got, other))
    different = int((a != b).sum())
    assert different == 0, f"{case_id}: {different} of {a.numel()} bytes differ"


def check_attention(q: Tensor, k: Tensor, v: Tensor, *, case_id: str = "", **options) -> Tensor:
    """Runs the op on tensors of any device and judges it; options as the op's. Returns the result.

    `enable_gqa` is set where the head counts ask for it.
    """
    grouped = q.dim() > 2 and q.shape[-3] != k.shape[-3]
    out = torch.ops.flash_mps.attention(q, k, v, enable_gqa=grouped, **options)
    assert out.dtype == q.dtype and out.device == q.device
    ref, _ = attention_ref(q, k, v, **options)
    check(out, ref, attention_lowp(q, k, v, **options), case_id=case_id)
    return out


def check_case(case: Case, device: torch.device, seed: int = 0) -> Tensor:
    """`check_attention` on the random inputs of a case."""
    inputs = make_inputs(case, device, seed)
    return check_attention(*inputs.operands, **inputs.options, case_id=case.id)


LSE_TOLERANCE = 2e-5   # float32 sums of thousands of terms, whatever the dtype of the inputs


def check_lse(q: Tensor, k: Tensor, v: Tensor, *, case_id: str = "", **options) -> None:
    """As `check_attention`, for out and lse of `return_lse=True`."""
    out, lse = torch_flash_mps.attention(
        q, k, v, enable_gqa=q.shape[-3] != k.shape[-3], return_lse=True, **options
    )
    ref, ref_lse = attention_ref(q, k, v, **options)
    check(out, ref, attention_lowp(q, k, v, **options), case_id=case_id)
    assert lse.dtype == torch.float32, f"{case_id}: expected a float32 lse, got {lse.dtype}"
    check_exact(lse, ref_lse, LSE_TOLERANCE, case_id=f"{case_id} lse")


def attention_lowp(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """The `out` of `attention_and_lse_lowp`."""
    return attention_and_lse_lowp(q, k, v, **options)[0]


def attention_and_lse_lowp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    causal_offset: int = 0,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    **band,
) -> tuple[Tensor, Tensor]:
    """Matmul, softmax, matmul in the dtype of q on the CPU: the error that plain torch makes.

    Differentiable. Shapes and options as `torch_flash_mps.reference.attention_ref`, of which `band`
    are is_causal and the windows; a row that sees no key gives 0 and an lse of -inf, or its sink.
    """
    q, k, v = (x.cpu() for x in (q, k, v))
    if q.dim() > 2 and q.shape[-3] != k.shape[-3]:
        group_size = q.shape[-3] // max(k.shape[-3], 1)
        k, v = (x.repeat_interleave(group_size, dim=-3) for x in (k, v))
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1]) if q.shape[-1] else 1.0
    scores = (q @ k.transpose(-1, -2)) * scale
    seqlen_q, seqlen_k = scores.shape[-2:]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        distance = torch.arange(seqlen_k) - (torch.arange(seqlen_q)[:, None] + causal_offset)
        scores = scores - _columns(alibi_slopes, scores) * distance.abs()
    visible = visible_pairs(seqlen_q, seqlen_k, causal_offset=causal_offset, **band)
    if attn_mask is not None:
        mask = attn_mask.cpu()
        if mask.dtype == torch.bool:
            visible = visible & mask
        else:
            scores = scores + mask.to(scores.dtype)
    scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        column = _columns(sinks, scores).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0.0)   # softmax of nothing but -inf is NaN
    probabilities = torch.softmax(scores, dim=-1)[..., :seqlen_k].masked_fill(empty, 0.0)
    if dropout_p:
        factors = dropout_factors(rng_state, *scores.shape[:3], seqlen_k, dropout_p)
        probabilities = probabilities * factors.to(probabilities.dtype)
    lse = torch.logsumexp(scores.float(), dim=-1)
    return probabilities @ v, lse.masked_fill(empty.squeeze(-1), -math.inf)


def _columns(per_head: Tensor, scores: Tensor) -> Tensor:
    """`[Hq]` or `[B, Hq]` in the dtype of the scores, against rows and keys."""
    return per_head.cpu().to(scores.dtype)[..., None, None]


def _comparable(got: Tensor, ref: Tensor, case_id: str) -> tuple[Tensor, Tensor]:
    assert got.shape == ref.shape, (
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
