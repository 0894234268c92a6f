"""`is_bottom_right`: the last query stands at the last key, as the flash_attn package aligns it."""

import pytest
import torch
from cases import DTYPE_NAMES, DTYPES, Case, ramp
from checks import attention_and_lse_lowp, check, check_exact
from gradients import case_operands, gradients, output_gradients

from torch_flash_mps.reference import attention_ref, visible_pairs

with_lse = torch.ops.flash_mps.attention_with_lse
ALIGNED = {"is_causal": True, "enable_gqa": True, "is_bottom_right": True}


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "means"),
    [(3, 8, [2.5, 3, 3.5]), (1, 8, [3.5]), (8, 3, [0, 0, 0, 0, 0, 0, 0.5, 1]), (2, 5, [1.5, 2])],
)
def test_DE_06_the_last_query_sees_every_key(place, seqlen_q, seqlen_k, means):
    q, k, v = (x.to(place) for x in ramp(seqlen_q, seqlen_k))
    out, lse = with_lse(q, k, v, **ALIGNED)
    check_exact(out[0, 0, :, 0], torch.tensor(means, dtype=torch.float64), 1e-6)
    empty = max(seqlen_q - seqlen_k, 0)
    assert (lse[0, 0, :empty] == -torch.inf).all() and torch.isfinite(lse[0, 0, empty:]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES.get)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(33, 70), (70, 33), (1, 40), (41, 1)])
def test_gradients(place, dtype, seqlen_q, seqlen_k):
    check_bottom_right(Case(2, 4, 2, seqlen_q, seqlen_k, 24, dtype=dtype), place)


@pytest.mark.parametrize("family", ["apple7", "apple9"])
def test_gradients_in_checked_mode(device, checked, on_family, family):
    if on_family(family):
        for seqlen_q, seqlen_k in ((21, 75), (75, 21)):
            check_bottom_right(Case(1, 2, 1, seqlen_q, seqlen_k, 16), device)


def test_without_is_causal_it_changes_nothing(place):
    q, k, v = (x.to(place) for x in ramp(3, 8))
    out, _ = with_lse(q, k, v, is_bottom_right=True)
    check_exact(out, 3.5, 1e-6)


def test_PY_09_opcheck(place):
    tests = torch.library.opcheck.__kwdefaults__["test_utils"]
    if place.type == "mps":   # of which this one knows nothing
        tests = [one for one in tests if one != "test_autograd_registration"]
    inputs = [x.to(place).requires_grad_() for x in ramp(3, 8)]
    result = torch.library.opcheck(with_lse.default, tuple(inputs), ALIGNED, test_utils=tests)
    assert set(result.values()) == {"SUCCESS"}


def check_bottom_right(case: Case, place: torch.device) -> None:
    """Out, lse and gradients against the oracle with a causal offset."""
    seqlens = {"seqlen_q": case.seqlen_q, "seqlen_k": case.seqlen_k}
    offset = case.seqlen_k - case.seqlen_q
    visible = visible_pairs(**seqlens, is_causal=True, causal_offset=offset)
    operands = case_operands(case, place) | {"attn_mask": visible}
    grads = output_gradients(case, place)

    def op(q, k, v, _):
        return with_lse(q, k, v, **ALIGNED)

    def reference(q, k, v, _):
        return attention_ref(q, k, v, is_causal=True, causal_offset=offset)

    def lowp_reference(q, k, v, mask):
        return attention_and_lse_lowp(q, k, v, attn_mask=mask)

    operands_only = [operands[name] for name in ("query", "key", "value")]
    with torch.no_grad():
        ref, ref_lse = reference(*operands_only, None)
        lowp, _ = lowp_reference(*operands_only, visible)
        out, lse = op(*operands_only, None)
    check(out, ref, lowp, case_id=case.id)
    check_exact(lse, ref_lse, 2e-5, case_id=case.id)
    got = gradients(op, operands, *grads)
    expected = gradients(reference, operands, *grads, torch.float64)
    plain = gradients(lowp_reference, operands, *grads, case.dtype)
    for name, gradient in got.items():
        check(gradient, expected[name], plain[name], case_id=f"{case.id}, {name}")
