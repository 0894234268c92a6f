"""Gradients of captured tensors: what the loads of a score_mod add up to, element by element.

Scores are computed again for a few rows at a time, so that memory holds no score matrix: about 50
bytes for each of `PAIRS_AT_ONCE` pairs. Pairs that read one element are sorted together and summed
in one fixed order: the same bits on every run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_flash_mps.flex.eager import pair_arguments, visible_pairs
from torch_flash_mps.flex.evaluate import element_numbers, evaluate
from torch_flash_mps.flex.program import Program

#: Of one query group's heads; at least one row of them.
PAIRS_AT_ONCE = 1 << 20


def captured_gradients(
    program: Program, operands: tuple[Tensor, Tensor, Tensor], classes: Tensor | None,
    scale: float, lse: Tensor, grad_out: Tensor, delta: Tensor,
) -> list[Tensor | None]:
    """One for each captured tensor; None where no load of a score reads it.

    delta: rowsum(grad_out * out) - grad_lse, ``[B, Hq, Sq]``.
    """
    totals: list[Tensor | None] = [None] * len(program.captured)
    for load in program.loads:
        tensor = program.captured[load.data]
        totals[load.data] = torch.zeros(tensor.numel(), device=lse.device)
    query, key, value = operands
    batch, num_heads, seqlen_q = lse.shape
    group = num_heads // key.size(1)
    step = max(1, PAIRS_AT_ONCE // max(group * key.size(2), 1))
    for b in range(batch):
        for first_head in range(0, num_heads, group):
            for first in range(0, seqlen_q, step):
                rows = slice(first, min(first + step, seqlen_q))
                _add_rows(program, totals, operands, classes, scale, lse, grad_out, delta,
                          b, slice(first_head, first_head + group), rows)
    return [total if total is None else total.reshape(tensor.shape).to(tensor.dtype)
            for total, tensor in zip(totals, program.captured, strict=True)]


def _add_rows(
    program: Program, totals: list[Tensor | None], operands: tuple[Tensor, Tensor, Tensor],
    classes: Tensor | None, scale: float, lse: Tensor, grad_out: Tensor, delta: Tensor,
    b: int, heads: slice, rows: slice,
) -> None:
    """Adds what the pairs of some rows of one query group contribute."""
    kv_head = heads.start // (heads.stop - heads.start)
    q = _entry(operands[0], b)[:, heads, rows].float()
    k, v = (_entry(x, b)[:, kv_head : kv_head + 1].float() for x in operands[1:])
    of_rows = (slice(b, b + 1), heads, rows)
    device = lse.device
    score = q @ k.transpose(-1, -2) * scale
    arguments = pair_arguments(score, torch.full((1,), b, device=device),
                               torch.arange(heads.start, heads.stop, device=device), rows)
    outputs = (program.score, program.mask, *program.partials)
    result, mask, *partials = evaluate(outputs, arguments, program.captured)
    if classes is not None:
        classes = _entry(classes, b)
        classes = classes[:, heads] if classes.size(1) > 1 else classes
    visible = visible_pairs(mask, classes, rows, k.size(2)) & (result != -torch.inf)
    weights = torch.exp(result - lse[of_rows].unsqueeze(-1))
    d_weights = grad_out[of_rows].float() @ v.transpose(-1, -2)
    d_score = weights * (d_weights - delta[of_rows].unsqueeze(-1))
    d_score = torch.where(visible & (weights != 0), d_score, 0.0)
    for load, partial in zip(program.loads, partials, strict=True):
        numbers = element_numbers(load, arguments, program.captured)
        parts = torch.where(d_score == 0, 0.0, d_score * partial)
        total = totals[load.data]
        assert total is not None
        total += sum_by_number(numbers, parts, total.numel())


def _entry(tensor: Tensor, b: int) -> Tensor:
    """One batch entry, [1, ...]."""
    return tensor[b : b + 1] if tensor.size(0) > 1 else tensor


def sum_by_number(numbers: Tensor, parts: Tensor, count: int) -> Tensor:
    """float32 ``[count]``: element n is the sum of the parts whose number, broadcast, is n.

    Summed in one fixed order, as a tree.
    """
    if parts.numel() == 0:
        return torch.zeros(count, device=parts.device)
    numbers = numbers.reshape((1,) * (parts.dim() - numbers.dim()) + numbers.shape)
    parts = parts.sum_to_size(numbers.shape).flatten()
    keys, order = torch.sort(numbers.flatten(), stable=True)
    sums = parts[order]
    # After the step of width w an element holds the sum of up to 2 w parts of its number.
    width = 1
    while width < sums.numel():
        before = torch.where(keys[width:] == keys[:-width], sums[:-width], 0.0)
        sums = torch.cat((sums[:width], sums[width:] + before))
        width *= 2
    is_last = torch.cat((keys[1:] != keys[:-1], keys.new_ones(1, dtype=torch.bool)))
    target = torch.where(is_last, keys, count)   # the others go beyond the end
    return torch.zeros(count + 1, device=parts.device).scatter(0, target, sums)[:count]
