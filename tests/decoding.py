"""Calls with few query rows, through every entry that decodes, and how they are judged."""

import torch
from checks import LSE_TOLERANCE, attention_lowp, check, check_exact, in_words_of_reference
from torch import Tensor

from torch_flash_mps.reference import attention_ref

#: The rows that the decode kernel takes; more of them are the forward kernel's.
MAX_ROWS = 16

#: How a call is made: None by the op, a number by attention_with_kvcache with as many splits of the
#: keys, 0 leaving that to the library.
ENTRIES = {"op": None, "kvcache": 0, "5-splits": 5}


def decode(
    num_splits: int | None, q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None,
    is_causal: bool = False, scale: float | None = None, is_bottom_right: bool = False,
    **score_options,
) -> tuple[Tensor, Tensor]:
    """Out and lse through an entry, whose own `is_causal` and windows are: see `causal_offset`."""
    options = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale} | score_options
    if num_splits is None:
        grouped = q.shape[1] != k.shape[1]
        return torch.ops.flash_mps.attention_with_lse(
            q, k, v, enable_gqa=grouped, is_bottom_right=is_bottom_right, **options)
    return torch.ops.flash_mps.attention_with_kvcache(q, k, v, num_splits=num_splits, **options)


def causal_offset(num_splits: int | None, seqlen_q: int, seqlen_k: int) -> int:
    """Query i stands at key i + this: top-left in the op by default, else bottom-right."""
    return 0 if num_splits is None else seqlen_k - seqlen_q


def check_decode(
    num_splits: int | None, q: Tensor, k: Tensor, v: Tensor, *, case_id: str = "", **options
) -> tuple[Tensor, Tensor]:
    """Runs `decode` and judges out and lse. Returns them."""
    out, lse = decode(num_splits, q, k, v, **options)
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    assert out.device == q.device and lse.device == q.device
    options = in_words_of_reference(options, q, k)
    options.setdefault("causal_offset", causal_offset(num_splits, q.shape[2], k.shape[2]))
    ref, ref_lse = attention_ref(q, k, v, **options)
    check(out, ref, attention_lowp(q, k, v, **options), case_id=case_id)
    check_exact(lse, ref_lse, LSE_TOLERANCE, case_id=f"{case_id} lse")
    return out, lse
