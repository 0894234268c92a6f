"""What a KV cache means, in plain Python: loops over sequences, tokens and slots, sums in float64.

Caches are CPU tensors ``[entries, slots, heads, head_dim]``, as in `torch_flash_mps.flash_attn`.
"""

from dataclasses import dataclass, field, replace

import torch
from checks import check_same_bits
from torch import Tensor

from torch_flash_mps import quantize_kv
from torch_flash_mps.reference import attention_ref


@dataclass
class Addressing:
    """Which slots the tokens of each sequence have. Numbers by sequence."""

    lengths: list[int]
    leftpad: list[int] | None = None
    batch_idx: list[int] | None = None
    block_table: list[list[int]] | None = None

    def tensors(self, device: torch.device | str) -> dict[str, Tensor | None]:
        """All but the lengths, in the words of flash_attn."""
        def tensor(numbers):
            return None if numbers is None else torch.tensor(numbers, dtype=torch.int32).to(device)

        return {"cache_leftpad": tensor(self.leftpad), "cache_batch_idx": tensor(self.batch_idx),
                "block_table": tensor(self.block_table)}

    def advanced(self, count: int) -> "Addressing":
        return replace(self, lengths=[length + count for length in self.lengths])


@dataclass
class Rotation:
    cos: Tensor
    sin: Tensor
    interleaved: bool = True


def rotated(row: Tensor, position: int, rotation: Rotation) -> Tensor:
    """``[heads, head_dim]`` in float64; pair by pair."""
    out = row.double().clone()
    if position < 0:
        return out
    half = rotation.cos.shape[1]
    for pair in range(half):
        a, b = (2 * pair, 2 * pair + 1) if rotation.interleaved else (pair, pair + half)
        c, s = (float(table[position, pair]) for table in (rotation.cos, rotation.sin))
        x, y = row[:, a].double(), row[:, b].double()
        out[:, a] = x * c - y * s
        out[:, b] = x * s + y * c
    return out


@dataclass
class KvModel:
    """A cache and what was written to it: ``written[(entry, slot)] = (k, v)`` in float64."""

    key: Tensor
    value: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    written: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def slots(self) -> int:
        return self.key.shape[1]

    def place(self, at: Addressing, sequence: int, slot: int) -> tuple[int, int] | None:
        """Entry and slot in it; None where there is none."""
        if slot < 0:
            return None
        if at.block_table is not None:
            pages = at.block_table[sequence]
            page, slot = divmod(slot, self.slots)
            entry = pages[page] if page < len(pages) else -1
        else:
            entry = sequence if at.batch_idx is None else at.batch_idx[sequence]
        inside = 0 <= entry < self.key.shape[0] and slot < self.slots
        return (entry, slot) if inside else None

    def append(self, at: Addressing, k: Tensor, v: Tensor, rotation: Rotation | None = None):
        """Notes what ``k, v [batch, seqlen_new, heads, head_dim]`` make of the cache."""
        for sequence, length in enumerate(at.lengths):
            for i in range(k.shape[1]):
                where = self.place(at, sequence, length + i)
                if where is None:
                    continue
                row = k[sequence, i].double()
                if rotation is not None:
                    pad = at.leftpad[sequence] if at.leftpad else 0
                    row = rotated(k[sequence, i], length + i - pad, rotation)
                self.written[where] = row, v[sequence, i].double()

    def row(self, where: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Key and value of a slot as the cache holds them, multiplied out, float64."""
        rows = []
        for cache, scale in ((self.key, self.k_scale), (self.value, self.v_scale)):
            row = cache[where].double()
            rows.append(row if scale is None else row * scale[where].double().unsqueeze(-1))
        return rows[0], rows[1]

    def attend(
        self, at: Addressing, q: Tensor, causal: bool = False, dtype: torch.dtype = torch.float64,
        alibi_slopes: Tensor | None = None, **options,
    ) -> tuple[Tensor, Tensor]:
        """Out ``[batch, seqlen_q, heads, head_dim]`` and lse over the filled slots, in `dtype`.

        `options`: those of `attention_ref`, the same for every sequence.
        """
        outs, lses = [], []
        heads = self.key.shape[2]
        for sequence, length in enumerate(at.lengths):
            pages = 1 if at.block_table is None else len(at.block_table[sequence])
            length = min(length, pages * self.slots)
            keys = torch.zeros(heads, length, self.key.shape[3], dtype=torch.float64)
            values = torch.zeros(heads, length, self.value.shape[3], dtype=torch.float64)
            visible = torch.zeros(1, length, dtype=torch.bool)
            for slot in range(at.leftpad[sequence] if at.leftpad else 0, length):
                where = self.place(at, sequence, slot)
                if where is not None:
                    keys[:, slot], values[:, slot] = self.row(where)
                    visible[:, slot] = True
            slopes = alibi_slopes
            if slopes is not None and slopes.dim() == 2:
                slopes = slopes[sequence]
            out, lse = attention_ref(
                q[sequence].transpose(0, 1), keys, values, is_causal=causal,
                causal_offset=length - q.shape[1], attn_mask=visible, dtype=dtype,
                alibi_slopes=slopes, **options,
            )
            outs.append(out.transpose(0, 1))
            lses.append(lse)
        return torch.stack(outs), torch.stack(lses)

    def fill(self, at: Addressing) -> None:
        """Random rows in the filled slots of the cache, leftpad excepted."""
        for sequence, length in enumerate(at.lengths):
            for slot in range(at.leftpad[sequence] if at.leftpad else 0, length):
                where = self.place(at, sequence, slot)
                if where is None:
                    continue
                for cache, scale in ((self.key, self.k_scale), (self.value, self.v_scale)):
                    row = torch.randn(cache.shape[2:])
                    if scale is None:
                        cache[where] = row
                    else:
                        cache[where], scale[where] = quantize_kv(row)


def empty_cache(
    entries: int, slots: int, heads: int, head_dim: int, dtype: torch.dtype, *,
    head_dim_v: int | None = None, is_int8: bool = False,
) -> KvModel:
    """A cache of NaN, and of integers with scales of NaN where it is int8."""
    shapes = [(entries, slots, heads, dim) for dim in (head_dim, head_dim_v or head_dim)]
    if is_int8:
        rows = (torch.randint(-127, 128, shape, dtype=torch.int8) for shape in shapes)
        return KvModel(*rows, *(torch.full((entries, slots, heads), torch.nan) for _ in shapes))
    return KvModel(*(torch.full(shape, torch.nan, dtype=dtype) for shape in shapes))


def angles(seqlen: int, rotary_dim: int) -> tuple[Tensor, Tensor]:
    """The usual tables, float32 ``[seqlen, rotary_dim / 2]``."""
    frequency = 10000.0 ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    angle = torch.arange(seqlen).double().unsqueeze(1) * frequency
    return angle.cos().float(), angle.sin().float()


def turned_queries(q: Tensor, at: Addressing, rotation: Rotation, causal: bool) -> Tensor:
    """q ``[batch, seqlen_q, heads, head_dim]`` as flash_attn turns it, rounded to its dtype."""
    out = q.clone()
    for sequence, length in enumerate(at.lengths):
        start = length - (at.leftpad[sequence] if at.leftpad else 0)
        for i in range(q.shape[1]):
            out[sequence, i] = rotated(q[sequence, i], start + (i if causal else 0), rotation)
    return out


def judge_cache(now: KvModel, expected: KvModel, case_id: str = "") -> None:
    """Raises AssertionError unless `now` is `expected` with its written slots, else bit for bit.

    Written rows may be off by one rounding to the dtype, plus what float32 arithmetic of a rotation
    costs; an 8-bit row by half a step.
    """
    for name, index in (("key", 0), ("value", 1)):
        cache, scale = ((now.key, now.k_scale), (now.value, now.v_scale))[index]
        untouched = torch.ones(cache.shape[:2], dtype=torch.bool)
        for where, rows in expected.written.items():
            untouched[where] = False
            row = rows[index]
            largest = row.abs().amax(-1, keepdim=True)
            if scale is None:
                bound = torch.finfo(cache.dtype).eps / 2 * row.abs() + 1e-6 * largest + 1e-7
            else:
                step = scale[where].double().unsqueeze(-1)
                assert ((step - largest / 127).abs() <= 1e-6 * largest).all(), f"{case_id}: {name}"
                bound = step / 2 + 1e-6 * largest
            error = (now.row(where)[index] - row).abs()
            assert (error <= bound).all(), f"{case_id}: {name} {where} is off by {error.max():.3e}"
        before = ((expected.key, expected.k_scale), (expected.value, expected.v_scale))[index]
        for found, old in zip((cache, scale), before, strict=True):
            if found is not None:
                check_same_bits(found[untouched], old[untouched], f"{case_id}: other {name}s")
