"""Any case: all options together, forward, backward and decode, against the float64 oracle."""

from dataclasses import replace

import torch
from any_case import SAME_EVERY_TIME, any_case
from cases import Case, make_inputs
from checks import check_lse
from decoding import ENTRIES, MAX_ROWS, check_decode
from gradients import check_case_gradients
from hypothesis import example, given, settings
from hypothesis import strategies as st

CPU = torch.device("cpu")
CASES = {"case": any_case(), "seed": st.integers(0, 2**16), "through_lse": st.booleans()}
DECODES = {
    "case": any_case(max_rows=MAX_ROWS, layouts=("sliced", "bshd", "aligned")),
    "seed": st.integers(0, 2**16),
    "entry": st.sampled_from([*ENTRIES.values()]),
}


def check_everything(case: Case, place: torch.device, seed: int, through_lse: bool) -> None:
    """Out and lse of the forward kernel, which runs for few rows too where a gradient is wanted."""
    inputs = make_inputs(case, place, seed)
    leaves = [x.detach().requires_grad_() for x in inputs.operands]
    check_lse(*leaves, **inputs.options, case_id=case.id)
    check_case_gradients(case, place, through_lse=through_lse, seed=seed, with_rounding=True)


def check_decoding(case: Case, place: torch.device, seed: int, entry: int | None) -> None:
    inputs = make_inputs(replace(case, dropout_p=0.0), place, seed)
    check_decode(entry, *inputs.operands, **inputs.options, case_id=f"{case.id}, {entry}")


@settings(SAME_EVERY_TIME, max_examples=100)
@example(Case(2, 2, 1, 5, 9, mask="float_heads", sinks=True), 0, True)
@given(**CASES)
def test_any_case_on_the_cpu(case, seed, through_lse):
    check_everything(case, CPU, seed, through_lse)


@settings(SAME_EVERY_TIME, max_examples=300)
@given(**CASES)
def test_any_case_checked_and_shuffled(device, checked, case, seed, through_lse):
    check_everything(case, device, seed, through_lse)


@settings(SAME_EVERY_TIME, max_examples=100)
@given(**DECODES)
def test_any_decode_on_the_cpu(case, seed, entry):
    check_decoding(case, CPU, seed, entry)


@settings(SAME_EVERY_TIME, max_examples=300)
@given(**DECODES)
def test_any_decode_checked_and_shuffled(device, checked, case, seed, entry):
    check_decoding(case, device, seed, entry)
