"""The same attention in plain torch operators, for CPU tensors. The score matrix is in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_flash_mps.flex.block_classes import MIXED, OPEN, expand_classes
from torch_flash_mps.flex.evaluate import evaluate
from torch_flash_mps.flex.program import Program


def attend(
    program: Program, query: Tensor, key: Tensor, value: Tensor, classes: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Out and lse; differentiable. Query heads are a multiple of the others' heads."""
    batch = max(query.size(0), key.size(0))
    group = query.size(1) // max(key.size(1), 1)
    operands = [x.float() for x in (query, key, value)]
    if not all(torch.isfinite(x).all() for x in operands[1:]):
        operands[1:] = _without_unseen(program, operands, group, classes, scale)
    q, k, v = operands
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = _scores(program, q, k, classes, scale, batch)
    most = scores.detach().amax(-1, keepdim=True) if scores.size(-1) else scores.new_zeros(
        (*scores.shape[:-1], 1))
    most = most.masked_fill(most == -torch.inf, 0.0)
    weights = torch.exp(scores - most)
    total = weights.sum(-1, keepdim=True)
    is_empty = total == 0
    total = total.masked_fill(is_empty, 1.0)
    out = (weights @ v / total).to(query.dtype)
    lse = (most + torch.log(total)).masked_fill(is_empty, -torch.inf)
    return out, lse.squeeze(-1)


def pair_arguments(
    score: Tensor, batch: Tensor, heads: Tensor, rows: slice
) -> dict[str, Tensor]:
    """What the functions get for a matrix of scores ``[batch, heads, rows, seqlen_k]``."""
    device = score.device
    return {
        "score": score,
        "b": batch.reshape(-1, 1, 1, 1), "h": heads.reshape(1, -1, 1, 1),
        "q_idx": torch.arange(rows.start, rows.stop, device=device).reshape(1, 1, -1, 1),
        "kv_idx": torch.arange(score.size(-1), device=device).reshape(1, 1, 1, -1),
    }


def visible_pairs(mask: Tensor, classes: Tensor | None, rows: slice, seqlen_k: int) -> Tensor:
    """`mask` in mixed blocks, all pairs of open ones."""
    if classes is None:
        return mask
    of_pairs = expand_classes(classes, rows, seqlen_k)
    return (of_pairs == OPEN) | ((of_pairs == MIXED) & mask)


def _scores(
    program: Program, q: Tensor, k: Tensor, classes: Tensor | None, scale: float, batch: int
) -> Tensor:
    """[B, Hq, Sq, Sk], -inf where a pair is hidden."""
    score = (q @ k.transpose(-1, -2) * scale).expand(batch, -1, -1, -1)
    rows = slice(0, q.size(2))
    arguments = pair_arguments(score, torch.arange(batch), torch.arange(q.size(1)), rows)
    result, mask = evaluate([program.score, program.mask], arguments, program.captured)
    visible = visible_pairs(mask, classes, rows, k.size(2))
    return torch.where(visible, result, -torch.inf).expand(score.shape)


def _without_unseen(
    program: Program, operands: list[Tensor], group: int, classes: Tensor | None, scale: float
) -> list[Tensor]:
    """Key and value with zeros in place of the keys that no query sees, whatever they hold."""
    q, k, v = operands
    with torch.no_grad():
        scores = _scores(program, q, k.repeat_interleave(group, dim=1), classes, scale,
                         max(q.size(0), k.size(0)))
        is_seen = (scores != -torch.inf).any(2).unflatten(1, (-1, group)).any(2).unsqueeze(-1)
    return [torch.where(is_seen, x, 0.0) for x in (k, v)]
