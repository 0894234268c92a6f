"""Calls whose right results need no reference: the anchors of the self-test.

RAMP: queries of 0 see all keys alike and value j is j, so that each output is the mean of the key
indexes that its row sees. EYE: one-hot queries and keys and an identity for values, so that the
output is the probability matrix.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_flash_mps import flash_attn, interface

#: A result, what it has to be, and by how much it may differ.
Result = tuple[Tensor, "Tensor | float", float]

#: Query rows that go to a kernel; up to 16 are the decode kernel's.
ROWS = {"forward": 20, "decode": 3}
INF = math.inf

# Any: what they return depends on their options.
attention: Callable[..., Any] = interface.attention
flash_attn_func: Callable[..., Any] = flash_attn.flash_attn_func
flash_attn_with_kvcache: Callable[..., Any] = flash_attn.flash_attn_with_kvcache


@dataclass(frozen=True)
class Anchor:
    case: str
    kernel: str
    about: str
    results: Callable[[], Iterator[Result]]


ANCHORS: list[Anchor] = []


def _anchor(case: str, kernel: str, about: str) -> Callable:
    def add(function: Callable[[], Iterator[Result]]) -> Callable:
        ANCHORS.append(Anchor(case, kernel, about, function))
        return function

    return add


def _anchor_of_rows(case: str, about: str) -> Callable:
    """For a function of the number of query rows, which decides the kernel."""
    def add(function: Callable[[int], Iterator[Result]]) -> Callable:
        for kernel, rows in ROWS.items():
            _anchor(case, kernel, about)(functools.partial(function, rows))
        return function

    return add


def _ramp(rows: int, seqlen_k: int, head_dim: int = 8, *, heads: int = 1,
          dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    query = torch.zeros(1, heads, rows, head_dim)
    key = torch.ones(1, heads, seqlen_k, head_dim)
    value = torch.arange(float(seqlen_k))[:, None].expand(1, heads, seqlen_k, head_dim)
    query, key, value = _on_device(query, key, value, dtype=dtype)
    return query, key, value


def _on_device(*tensors: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return tuple(x.to("mps", dtype) for x in tensors)


def _column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32).reshape(1, 1, -1, 1)


def _per_head(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32).reshape(1, -1, 1, 1)


@_anchor_of_rows("KF-07", "the first blocks of keys are hidden")
def first_keys_hidden(rows: int) -> Iterator[Result]:
    visible = torch.arange(441) >= 128
    for mask in (visible, torch.where(visible, 0.0, -INF),
                 torch.where(visible, 0.0, torch.finfo(torch.float32).min)):
        yield attention(*_ramp(rows, 441), attn_mask=mask[None].to("mps")), 284.0, 1e-4


@_anchor_of_rows("KF-08", "a row that sees no key is 0, its lse -inf")
def rows_without_a_key(rows: int) -> Iterator[Result]:
    visible = torch.zeros(rows, 8, dtype=torch.bool)
    visible[0] = True
    expected = torch.zeros(1, 1, rows, 8)
    expected[:, :, 0] = 3.5
    lse = torch.full((1, 1, rows), -INF)
    lse[:, :, 0] = math.log(8)
    got = attention(*_ramp(rows, 8), attn_mask=visible.to("mps"), return_lse=True)
    yield got[0], expected, 1e-6
    yield got[1], lse, 1e-6


@_anchor_of_rows("KF-13", "float16: scores beyond 65504")
def large_products(rows: int) -> Iterator[Result]:
    query, key, value = _ramp(rows, 6, 128, dtype=torch.float16)
    yield attention(query + 128, key * 128, value), 2.5, 0


@_anchor_of_rows("KF-14", "float16: query times scale beyond 65504")
def scaled_query(rows: int) -> Iterator[Result]:
    query, key, value = _ramp(rows, 4, dtype=torch.float16)
    yield attention(query + 30000, key * 0, value, scale=4.0), 1.5, 0


@_anchor_of_rows("KF-15", "float16: sums of values beyond 65504")
def large_values(rows: int) -> Iterator[Result]:
    query, key, _ = _ramp(rows, 4096, dtype=torch.float16)
    for seqlen_k in (4, 4096):
        yield attention(query, key[:, :, :seqlen_k], key[:, :, :seqlen_k] * 60000), 60000.0, 0


@_anchor_of_rows("KF-18", "grouped heads read their own keys")
def grouped_heads(rows: int) -> Iterator[Result]:
    query, value = _on_device(torch.zeros(1, 6, rows, 8), _per_head(0, 1).expand(1, 2, 3, 8))
    yield attention(query, value, value, enable_gqa=True), _per_head(0, 0, 0, 1, 1, 1), 1e-6


@_anchor_of_rows("KF-19", "a constant mask changes nothing")
def constant_mask(rows: int) -> Iterator[Result]:
    yield attention(*_ramp(rows, 3), attn_mask=torch.ones(rows, 3, device="mps")), 1.0, 1e-6


@_anchor_of_rows("KF-20", "causal in every head and batch entry")
def causal_heads(rows: int) -> Iterator[Result]:
    offset = 100 * _per_head(0, 1, 2, 3) + 1000 * torch.arange(2.0).reshape(2, 1, 1, 1)
    query, key, value = (x.expand(2, 4, -1, -1) for x in _ramp(rows, rows))
    means = torch.arange(float(rows))[:, None] / 2
    got = attention(query, key, value + offset.to("mps"), is_causal=True)
    yield got, offset + means, 1e-3


@_anchor_of_rows("KF-21", "any byte but 0 of a bool mask is True")
def bytes_of_a_mask(rows: int) -> Iterator[Result]:
    mask = torch.full((rows, 8), 2, dtype=torch.uint8, device="mps").view(torch.bool)
    yield attention(*_ramp(rows, 8), attn_mask=mask), 3.5, 1e-6


@_anchor_of_rows("KF-24", "softcap comes before the mask")
def softcap(rows: int) -> Iterator[Result]:
    query = torch.zeros(1, 1, rows, 8)
    query[..., 0] = 10
    key, value = torch.zeros(1, 1, 2, 8), torch.eye(2, 8)[None, None]
    key[0, 0, 0, 0] = 10
    options: dict[str, Any] = {"scale": 1.0, "softcap": 1.0}
    for hidden, expected in ((False, (0.731059, 0.268941)), (True, (0.0, 1.0))):
        mask = torch.tensor([[not hidden, True]], device="mps")
        got = attention(*_on_device(query, key, value), attn_mask=mask, **options)
        yield got[..., :2], torch.tensor(expected), 1e-6


@_anchor_of_rows("KF-25", "sinks are in the denominator")
def sinks(rows: int) -> Iterator[Result]:
    query, key = _on_device(torch.zeros(1, 4, rows, 8), torch.ones(1, 2, 3, 8))
    numbers = torch.tensor([0, math.log(5), -INF, 80], device="mps")
    got = attention(query, key, 3 * key, enable_gqa=True, sinks=numbers)
    yield got, _per_head(2.25, 1.125, 3, 0), 1e-6


@_anchor_of_rows("KF-27", "where lanes hold a matrix, three dtypes")
def fragment_layout(rows: int) -> Iterator[Result]:
    for seqlen in (8, 9) if rows <= 16 else (17, 64):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            one_hot, identity = _on_device(64 * torch.eye(seqlen, 64)[None, None],
                                           torch.eye(seqlen, 64)[None, None], dtype=dtype)
            yield attention(one_hot, one_hot, identity), torch.eye(seqlen, 64), 1e-6


@_anchor_of_rows("IN-03", "a window of 4 keys")
def window(rows: int) -> Iterator[Result]:
    last = torch.arange(float(rows))
    means = (last + (last - 3).clamp(min=0)) / 2
    got = attention(*_ramp(rows, rows), is_causal=True, window_left=3)
    yield got[0, 0, :, 0], means, 1e-5


@_anchor_of_rows("PY-03", "flash_attn: causal is bottom-right")
def bottom_right(rows: int) -> Iterator[Result]:
    got = flash_attn_func(*(x.transpose(1, 2) for x in _ramp(rows, rows + 3)), causal=True)
    yield got[0, :, 0, 0], (torch.arange(float(rows)) + 3) / 2, 1e-5


@_anchor_of_rows("PY-04", "lse is a natural logarithm, and merges")
def merging(rows: int) -> Iterator[Result]:
    query, key, _ = _ramp(rows, 8)
    (few, few_lse), (many, many_lse) = (
        attention(query, key[:, :, :count], key[:, :, :count] * size, return_lse=True)
        for count, size in ((2, 1), (6, 5)))
    yield few_lse, math.log(2), 1e-6
    out, lse = interface.merge_states(few, few_lse, many, many_lse)
    yield out, 4.0, 1e-5
    yield lse, math.log(8), 1e-6


@_anchor("PY-07", "forward", "dropout of everything is 0")
def dropout() -> Iterator[Result]:
    yield attention(*_ramp(20, 8), dropout_p=1.0), 0.0, 0


@_anchor_of_rows("PY-13", "ALiBi takes the distance")
def alibi(rows: int) -> Iterator[Result]:
    got = flash_attn_func(*(x.transpose(1, 2) for x in _ramp(rows, 3)),
                          alibi_slopes=torch.tensor([0.5], device="mps"))
    yield got[0, -1, 0], 1.320157, 1e-6


@_anchor("DE-05", "decode", "splits of the keys of which one sees any")
def splits(seqlen_k: int = 4096) -> Iterator[Result]:
    for seen, expected in ((5, 5.0), (seqlen_k - 1, seqlen_k - 1.0), (-1, 0.0)):
        mask = (torch.arange(seqlen_k) == seen)[None].to("mps")
        yield attention(*_ramp(1, seqlen_k), attn_mask=mask), expected, 0


@_anchor("DE-07", "decode", "a cache ends at its length, NaN beyond")
def cache() -> Iterator[Result]:
    lengths = torch.tensor([40, 17])
    key = torch.where(torch.arange(64) < lengths[:, None], torch.arange(64.0), math.nan)
    key = key.reshape(2, 64, 1, 1).expand(-1, -1, -1, 8).to("mps")
    got = flash_attn_with_kvcache(torch.zeros(2, 1, 1, 8, device="mps"), key, key,
                                  cache_seqlens=lengths.to("mps", torch.int32))
    yield got[:, 0, 0, 0], (lengths - 1) / 2, 1e-5


def _gradients(*operands: Tensor, mask: Tensor | None = None, sinks: Tensor | None = None,
               **options: Any) -> tuple[Tensor, ...]:
    """Of the sum of the output, for every operand that is there."""
    query, key, value, mask, sinks = leaves = [
        None if x is None else x.to("mps").requires_grad_() for x in (*operands, mask, sinks)]
    with torch.enable_grad():
        out = attention(query, key, value, attn_mask=mask, sinks=sinks, **options)
        return torch.autograd.grad(out.sum(), [x for x in leaves if x is not None])


@_anchor("BW-04", "backward", "gradients of query and key")
def closed_forms() -> Iterator[Result]:
    value = _column(0, 1, 2, 3)
    grads = _gradients(torch.zeros(1, 1, 4, 4), torch.eye(4)[None, None], value, scale=1.0)
    yield grads[0], torch.tensor([-0.375, -0.125, 0.125, 0.375]), 1e-6
    grads = _gradients(torch.ones(1, 1, 2, 1), torch.zeros(1, 1, 4, 1), value, scale=1.0)
    yield grads[1], _column(-0.75, -0.25, 0.25, 0.75), 1e-6


@_anchor("BW-07", "backward", "the gradient of a mask, summed")
def mask_gradient() -> Iterator[Result]:
    value = _column(0, 1, 2, 3).expand(1, 2, 4, 1)
    mask = torch.zeros(1, 1, 1, 4)
    grads = _gradients(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 4, 4), value, mask=mask)
    yield grads[3].flatten(), torch.tensor([-2.25, -0.75, 0.75, 2.25]), 1e-6


@_anchor("BW-05", "backward", "rows without a key have no gradient")
def empty_rows_gradient() -> Iterator[Result]:
    key = torch.arange(8.0).reshape(1, 1, 2, 4) / 8
    mask = torch.tensor([[-INF, -INF], [0.0, 0.0]])
    grads = _gradients(key, key, key, mask=mask)
    yield grads[0][:, :, 0], 0.0, 0
    yield grads[2].sum(), 4.0, 1e-6


@_anchor("BW-08", "backward", "the gradient of a sink")
def sink_gradient() -> Iterator[Result]:
    grads = _gradients(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 3, 1), _column(3, 3, 3),
                       sinks=torch.zeros(1))
    yield grads[3], -0.5625, 1e-6


@_anchor("BW-09", "backward", "the derivative of softcap")
def softcap_gradient() -> Iterator[Result]:
    grads = _gradients(_column(1), _column(1, 0), _column(1, 0), softcap=1.0, scale=1.0)
    yield grads[0].flatten(), torch.tensor([0.091128]), 1e-6
    yield grads[1].flatten(), torch.tensor([0.091128, -0.216985]), 1e-6
    yield grads[2].flatten(), torch.tensor([0.681700, 0.318300]), 1e-6
