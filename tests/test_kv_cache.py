"""flash_attn_with_kvcache: what is appended, what is read, and what must be neither."""

from dataclasses import replace

import pytest
import torch
from cases import DTYPE_NAMES, DTYPES, poisoned
from checks import check, check_exact, check_same_bits
from kv_model import (
    Addressing,
    KvModel,
    Rotation,
    angles,
    empty_cache,
    judge_cache,
    turned_queries,
)

from torch_flash_mps.flash_attn import flash_attn_func, flash_attn_with_kvcache

PAGES = [[6, 2, 0, 5], [1, 4, 7, 3]]
ADDRESSINGS = {
    "entries": Addressing([5, 50]),
    "empty": Addressing([0, 0]),
    "batch_idx": Addressing([37, 12], batch_idx=[3, 1]),
    "leftpad": Addressing([33, 20], leftpad=[9, 20]),
    "paged": Addressing([13, 55], block_table=PAGES),
    "paged-leftpad": Addressing([47, 16], leftpad=[17, 0], block_table=PAGES),
}


def on_device(cache: KvModel, place: torch.device) -> KvModel:
    return KvModel(*(None if x is None else x.clone().to(place)
                     for x in (cache.key, cache.value, cache.k_scale, cache.v_scale)))


def scales(cache: KvModel) -> dict:
    return {"k_scale": cache.k_scale, "v_scale": cache.v_scale}


def run_and_judge(
    place: torch.device, at: Addressing, *, dtype: torch.dtype = torch.float32,
    is_int8: bool = False, causal: bool = True, seqlen_q: int = 3, seqlen_new: int = 3,
    heads: tuple[int, int] = (4, 2), head_dim: int = 32, interleaved: bool | None = None,
    layout: str = "sliced", case_id: str = "", **options,
) -> None:
    """One call on random inputs, NaN wherever nothing may be read, against the model."""
    batch, (heads_q, heads_kv) = len(at.lengths), heads
    entries, slots = (4, 64) if at.block_table is None else (8, 16)
    cache = empty_cache(entries, slots, heads_kv, head_dim, dtype, is_int8=is_int8)
    cache.fill(at)
    q = torch.randn(batch, seqlen_q, heads_q, head_dim).to(dtype)
    k, v = torch.randn(2, batch, seqlen_new, heads_kv, head_dim).to(dtype)
    turned, rotation, named = q, None, {}
    if interleaved is not None:
        rotation = Rotation(*angles(64, head_dim // 2), interleaved)
        turned = turned_queries(q, at, rotation, causal)
        named = {"rotary_cos": rotation.cos.to(place), "rotary_sin": rotation.sin.to(place),
                 "rotary_interleaved": interleaved}
    if seqlen_new:
        cache.append(at, k, v, rotation)
        named |= {"k": poisoned(k, place, layout), "v": poisoned(v, place, layout)}
    device_cache = on_device(cache, place)
    seqlens = options.pop("cache_seqlens",
                          torch.tensor(at.lengths, dtype=torch.int32).to(place))
    out, lse = flash_attn_with_kvcache(
        poisoned(q, place, layout), device_cache.key, device_cache.value, cache_seqlens=seqlens,
        causal=causal, return_softmax_lse=True, **at.tensors(place), **named,
        **scales(device_cache), **options,
    )
    now = on_device(device_cache, torch.device("cpu"))
    judge_cache(now, cache, case_id)
    filled = at.advanced(seqlen_new)
    ref, ref_lse = now.attend(filled, turned, causal)
    assert out.dtype == dtype and lse.dtype == torch.float32
    check(out, ref, now.attend(filled, turned, causal, dtype)[0], case_id=case_id)
    # Queries that were turned and then rounded are met within that rounding only.
    tolerance = 2e-5 if interleaved is None else 2e-5 + 8 * torch.finfo(dtype).eps
    check_exact(lse, ref_lse, tolerance, case_id=f"{case_id} lse")


@pytest.mark.parametrize("is_int8", [False, True], ids=["same", "int8"])
@pytest.mark.parametrize("name", ADDRESSINGS)
def test_DE_07_only_filled_slots_count(place, name, is_int8):
    for causal in (False, True):
        for seqlen_q, seqlen_new in ((1, 1), (3, 3), (2, 0), (5, 1), (19, 3)):
            run_and_judge(place, ADDRESSINGS[name], is_int8=is_int8, causal=causal,
                          seqlen_q=seqlen_q, seqlen_new=seqlen_new,
                          case_id=f"{name}-{causal}-{seqlen_q}-{seqlen_new}")


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES.get)
@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary(place, dtype, interleaved):
    for name, causal, is_int8 in (("leftpad", True, False), ("paged-leftpad", True, True),
                                  ("entries", False, False)):
        run_and_judge(place, ADDRESSINGS[name], dtype=dtype, interleaved=interleaved,
                      causal=causal, is_int8=is_int8, case_id=name)


@pytest.mark.parametrize("heads", [(1, 1), (8, 1), (6, 2), (3, 3)], ids=str)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
def test_grouped_heads(place, heads, head_dim):
    run_and_judge(place, ADDRESSINGS["paged"], heads=heads, head_dim=head_dim, dtype=torch.float16,
                  layout="aligned")


@pytest.mark.parametrize("name", ["entries", "paged-leftpad"])
@pytest.mark.parametrize("is_int8", [False, True], ids=["same", "int8"])
def test_in_checked_mode(device, checked, name, is_int8):
    for num_splits in (0, 3):
        run_and_judge(device, ADDRESSINGS[name], dtype=torch.bfloat16, is_int8=is_int8,
                      interleaved=False, num_splits=num_splits)


@pytest.mark.parametrize("is_paged", [False, True], ids=["entries", "paged"])
def test_DE_07_a_length_known_here(place, is_paged):
    table = PAGES if is_paged else None
    for length in (0, 40, 61):
        at = Addressing([length, length], block_table=table)
        run_and_judge(place, at, cache_seqlens=length)
        run_and_judge(place, at, cache_seqlens=torch.tensor(at.lengths).to(place))   # int64
    cache = on_device(empty_cache(8 if is_paged else 2, 16 if is_paged else 64, 2, 8,
                                  torch.float32), place)
    before = on_device(cache, place)
    q, new = torch.ones(2, 1, 4, 8, device=place), torch.ones(2, 3, 2, 8, device=place)
    for length in (62, -1):
        with pytest.raises(ValueError, match=f"between 0 and 61 .*64 slots, got {length}"):
            flash_attn_with_kvcache(q, cache.key, cache.value, new, new, cache_seqlens=length,
                                    **replace(at, lengths=[length] * 2).tensors(place))
    check_same_bits(cache.key, before.key)
    check_same_bits(cache.value, before.value)


def test_DE_07_the_same_as_a_sliced_cache(place):
    cache = empty_cache(2, 64, 2, 64, torch.float32)
    at = Addressing([40, 17])
    cache.fill(at)
    q = torch.randn(2, 1, 4, 64)
    out = flash_attn_with_kvcache(
        q.to(place), cache.key.to(place), cache.value.to(place),
        cache_seqlens=torch.tensor(at.lengths, dtype=torch.int32).to(place))
    for b, length in enumerate(at.lengths):
        sliced = flash_attn_func(*(x[b:b + 1, :n].to(place) for x, n in (
            (q, 1), (cache.key, length), (cache.value, length))))
        check_exact(out[b:b + 1], sliced, 1e-6)


def test_without_lengths_the_whole_cache_counts(place):
    cache = empty_cache(2, 48, 2, 16, torch.float32)
    cache.fill(Addressing([48, 48]))
    q = torch.randn(2, 2, 2, 16)
    out = flash_attn_with_kvcache(q.to(place), cache.key.to(place), cache.value.to(place),
                                  causal=True)
    check_exact(out, cache.attend(Addressing([48, 48]), q, causal=True)[0], 1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES.get)
@pytest.mark.parametrize("kind", ["entries", "paged", "int8"])
def test_DE_09_chunks_equal_the_whole(place, dtype, kind):
    seqlen, heads_q, heads_kv, head_dim = 40, 6, 2, 32
    q = torch.randn(1, seqlen, heads_q, head_dim).to(dtype)
    k, v = torch.randn(2, 1, seqlen, heads_kv, head_dim).to(dtype)
    at = Addressing([0], block_table=[[2, 0, 3]] if kind == "paged" else None)
    cache = on_device(empty_cache(4, 16 if kind == "paged" else 48, heads_kv, head_dim, dtype,
                                  is_int8=kind == "int8"), place)
    chunks = []
    for count in (17, 1, 5, 8, 9):
        (start,) = at.lengths
        parts = [x[:, start:start + count].to(place) for x in (q, k, v)]
        chunks.append(flash_attn_with_kvcache(
            parts[0], cache.key, cache.value, parts[1], parts[2], causal=True,
            cache_seqlens=torch.tensor(at.lengths, dtype=torch.int32).to(place),
            **at.tensors(place), **scales(cache)))
        at = at.advanced(count)
    got = torch.cat(chunks, dim=1)
    now = on_device(cache, torch.device("cpu"))
    ref, lowp = (now.attend(at, q, True, one)[0] for one in (torch.float64, dtype))
    check(got, ref, lowp, case_id=kind)
    if kind != "int8":
        whole = flash_attn_func(*(x.to(place) for x in (q, k, v)), causal=True)
        check(whole, ref, lowp, case_id=f"{kind}, whole")


@pytest.mark.parametrize("position", [0, 4, 15, 30, 31, 32])
def test_DE_10_garbage_beyond_the_position(place, position):
    q = torch.randn(1, 1, 2, 32)
    filled = Addressing([position + 1])
    cache = empty_cache(1, 64, 2, 32, torch.float32)
    cache.fill(filled)
    cache.key[:, position + 1:] = 1e3 * q
    cache.value[:, position + 1:] = 1e3
    out = flash_attn_with_kvcache(
        q.to(place), cache.key.to(place), cache.value.to(place),
        cache_seqlens=torch.tensor(filled.lengths, dtype=torch.int32).to(place))
    fresh = flash_attn_with_kvcache(
        *(x.to(place) for x in (q, cache.key[:, :position + 1], cache.value[:, :position + 1])))
    check_exact(out, fresh, 1e-6)
    check_exact(out, cache.attend(filled, q)[0], 1e-6)


def test_caches_are_used_where_they_lie(place):
    """Layers and operands of one buffer, as models keep them: [layers, batch, seqlen, 2, H, D]."""
    buffer = torch.full((3, 2, 64, 2, 2, 16), torch.nan).to(place)
    at = Addressing([0, 0])
    before = buffer.clone()
    k, v = torch.randn(2, 2, 5, 2, 16)
    q = torch.randn(2, 5, 4, 16)
    key, value = buffer[1].unbind(2)
    out = flash_attn_with_kvcache(q.to(place), key, value, k.to(place), v.to(place),
                                  cache_seqlens=0, causal=True)
    before[1, :, :5, 0], before[1, :, :5, 1] = k.to(place), v.to(place)
    check_same_bits(buffer, before)
    check_exact(out, KvModel(k, v).attend(at.advanced(5), q, causal=True)[0], 1e-6)


def test_nothing_waits_for_the_device(device, simulator):
    # Which the simulated device would wait for.
    torch.utils.deterministic.fill_uninitialized_memory = False
    cache = on_device(empty_cache(2, 64, 2, 8, torch.float16), device)
    q, new = torch.ones(2, 1, 4, 8, device=device).half(), torch.ones(2, 1, 2, 8, device=device)
    seqlens = torch.tensor([4, 9]).to(device)   # int64: converted there
    tables = [x.to(device) for x in angles(64, 8)]
    torch.mps.synchronize()
    commits = simulator.stats()["commits"] if simulator else 0
    flash_attn_with_kvcache(q, cache.key, cache.value, new.half(), new.half(), *tables, seqlens)
    if simulator:
        assert simulator.stats()["commits"] == commits
