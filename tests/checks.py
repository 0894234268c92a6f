"""How tests judge the op: by `torch_flash_mps.judge`, with plain low-precision torch beside it."""

import math

import torch
from cases import Case, make_inputs
from torch import Tensor

from torch_flash_mps.judge import FLOOR, check, check_exact
from torch_flash_mps.reference import attention_ref, dropout_factors, visible_pairs

__all__ = ["FLOOR", "LSE_TOLERANCE", "attention_and_lse_lowp", "attention_lowp", "check",
           "check_attention", "check_case", "check_exact", "check_lse", "check_same_bits"]


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
    options = in_words_of_reference(options, q, k)
    ref, _ = attention_ref(q, k, v, **options)
    check(out, ref, attention_lowp(q, k, v, **options), case_id=case_id)
    return out


def in_words_of_reference(options: dict, q: Tensor, k: Tensor) -> dict:
    """Options of the op as those of `torch_flash_mps.reference.attention_ref`."""
    options = dict(options)
    if options.pop("is_bottom_right", False):
        options["causal_offset"] = k.shape[-2] - q.shape[-2]
    return options


def check_case(case: Case, device: torch.device, seed: int = 0) -> Tensor:
    """`check_attention` on the random inputs of a case."""
    inputs = make_inputs(case, device, seed)
    return check_attention(*inputs.operands, **inputs.options, case_id=case.id)


LSE_TOLERANCE = 2e-5   # float32 sums of thousands of terms, whatever the dtype of the inputs


def check_lse(q: Tensor, k: Tensor, v: Tensor, *, case_id: str = "", **options) -> None:
    """As `check_attention`, for out and lse."""
    out, lse = torch.ops.flash_mps.attention_with_lse(
        q, k, v, enable_gqa=q.shape[-3] != k.shape[-3], **options
    )
    options = in_words_of_reference(options, q, k)
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
