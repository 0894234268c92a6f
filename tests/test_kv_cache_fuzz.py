"""Random sequences of calls on one KV cache against a plain Python model of it."""

from dataclasses import dataclass, replace

import torch
from cases import DTYPES
from checks import check, check_exact
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_model import (
    Addressing,
    KvModel,
    Rotation,
    angles,
    empty_cache,
    judge_cache,
    turned_queries,
)
from torch import Tensor

from torch_flash_mps.flash_attn import flash_attn_with_kvcache

CAPACITY, PAGE = 144, 16
LAYOUTS = ("dense", "heads-first", "beside-values", "sliced")


@dataclass(frozen=True)
class Story:
    """A cache and what happens to it, call by call."""

    heads: tuple[int, int]
    head_dim: int
    dtype: torch.dtype
    is_int8: bool
    is_paged: bool
    has_batch_idx: bool
    layout: str
    interleaved: bool | None   # None: no rotary embedding
    causal: bool
    lengths: tuple[int, ...]
    leftpad: tuple[int, ...] | None
    calls: tuple[tuple[int, int], ...]   # new tokens; queries, 0 = as many
    window: tuple[int, int]
    softcap: float
    alibi: str | None   # "heads" or "batch": slopes of each head, or of each sequence too
    restarts: int | None   # the sequence that begins anew after the first call
    seed: int


@st.composite
def stories(draw) -> Story:
    batch = draw(st.integers(1, 3))
    numbers = st.tuples(*(st.integers(0, 130) for _ in range(batch)))
    return Story(
        heads=draw(st.sampled_from([(1, 1), (4, 2), (3, 1)])),
        head_dim=draw(st.sampled_from([20, 64])),
        dtype=draw(st.sampled_from(DTYPES)),
        is_int8=draw(st.booleans()),
        is_paged=draw(st.booleans()),
        has_batch_idx=draw(st.booleans()),
        layout=draw(st.sampled_from(LAYOUTS)),
        interleaved=draw(st.sampled_from([None, True, False])),
        causal=draw(st.booleans()),
        lengths=draw(numbers),
        leftpad=draw(st.none() | numbers),
        calls=tuple(draw(st.lists(
            st.tuples(st.sampled_from([0, 1, 1, 1, 2, 7, 17]), st.sampled_from([0, 0, 1, 3])),
            min_size=1, max_size=4))),
        window=draw(st.sampled_from([(-1, -1), (-1, 0), (0, -1), (17, 3), (100, -1)])),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.5])),
        alibi=draw(st.sampled_from([None, "heads", "batch"])),
        restarts=draw(st.none() | st.integers(0, batch - 1)),
        seed=draw(st.integers(0, 2**16)),
    )


def lay_out(cache: KvModel, layout: str, place: torch.device) -> list[Tensor | None]:
    """Key, value and their scales as views of device buffers."""
    tensors = (cache.key, cache.value, cache.k_scale, cache.v_scale)
    if layout == "beside-values":
        pairs = [None if a is None else torch.stack((a, b), 2).to(place).unbind(2)
                 for a, b in (tensors[:2], tensors[2:])]
        return [x for pair in pairs for x in (pair or (None, None))]
    if layout == "heads-first":
        return [None if x is None else x.transpose(1, 2).contiguous().to(place).transpose(1, 2)
                for x in tensors]
    if layout == "sliced":
        return [None if x is None else torch.stack((x, x, x)).to(place)[1] for x in tensors]
    return [None if x is None else x.clone().to(place) for x in tensors]


def first_addressing(story: Story) -> Addressing:
    batch = len(story.lengths)
    at = Addressing(list(story.lengths), list(story.leftpad) if story.leftpad else None)
    if story.is_paged:
        pages = torch.randperm(batch * CAPACITY // PAGE).reshape(batch, -1)
        for own, length in zip(pages, at.lengths, strict=True):
            # Pages that no token will need are not there.
            own[-(-(length + sum(count for count, _ in story.calls)) // PAGE):] = -1
        return replace(at, block_table=pages.tolist())
    if story.has_batch_idx:
        return replace(at, batch_idx=torch.randperm(batch + 1)[:batch].tolist())
    return at


def tell(story: Story, place: torch.device) -> None:
    torch.manual_seed(story.seed)
    at, batch, (heads_q, heads_kv) = first_addressing(story), len(story.lengths), story.heads
    entries, slots = ((batch * CAPACITY // PAGE, PAGE) if story.is_paged
                      else (batch + 1, CAPACITY))
    expected = empty_cache(entries, slots, heads_kv, story.head_dim, story.dtype,
                           is_int8=story.is_int8)
    expected.fill(at)
    tensors = lay_out(expected, story.layout, place)
    rotation, named = None, {}
    if story.interleaved is not None:
        rotation = Rotation(*angles(2 * CAPACITY, 16), story.interleaved)
        named = {"rotary_cos": rotation.cos.to(place), "rotary_sin": rotation.sin.to(place),
                 "rotary_interleaved": story.interleaved}
    left, right = story.window
    meant = {"window_left": left, "window_right": right, "softcap": story.softcap}
    scores = {"window_size": story.window, "softcap": story.softcap}
    if story.alibi is not None:
        slopes = torch.rand(batch, heads_q) if story.alibi == "batch" else torch.rand(heads_q)
        meant["alibi_slopes"], scores["alibi_slopes"] = slopes, slopes.to(place)
    for number, (seqlen_new, seqlen_q) in enumerate(story.calls):
        if number == 1 and story.restarts is not None:
            at.lengths[story.restarts] = 0
            at.leftpad = None if at.leftpad is None else [
                0 if b == story.restarts else pad for b, pad in enumerate(at.leftpad)]
        q = torch.randn(batch, seqlen_q or max(seqlen_new, 1), heads_q, story.head_dim)
        q, options = q.to(story.dtype), dict(named)
        turned = q
        if seqlen_new:
            k, v = torch.randn(2, batch, seqlen_new, heads_kv, story.head_dim).to(story.dtype)
            expected.append(at, k, v, rotation)
            options |= {"k": k.to(place), "v": v.to(place)}
            if rotation is not None:
                turned = turned_queries(q, at, rotation, story.causal)
        else:
            options = {}
        out, lse = flash_attn_with_kvcache(
            q.to(place), *tensors[:2], k_scale=tensors[2], v_scale=tensors[3],
            cache_seqlens=torch.tensor(at.lengths, dtype=torch.int32).to(place),
            causal=story.causal, return_softmax_lse=True, **at.tensors(place), **scores, **options)
        at = at.advanced(seqlen_new)
        now = KvModel(*(None if x is None else x.cpu() for x in tensors))
        judge_cache(now, expected, f"{story}, call {number}")
        ref, ref_lse = now.attend(at, turned, story.causal, **meant)
        lowp, _ = now.attend(at, turned, story.causal, story.dtype, **meant)
        check(out, ref, lowp, case_id=f"{story}, call {number}")
        tolerance = 2e-5 if turned is q else 2e-5 + 8 * torch.finfo(story.dtype).eps
        check_exact(lse, ref_lse, tolerance, f"{story}, call {number}, lse")


SAME_EVERY_TIME = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@settings(SAME_EVERY_TIME, max_examples=60)
@given(story=stories())
def test_any_story(place, story):
    tell(story, place)


@settings(SAME_EVERY_TIME, max_examples=12)
@given(story=stories())
def test_any_story_checked_and_shuffled(device, checked, story):
    tell(story, device)
