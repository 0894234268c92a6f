"""kvcache_append_: tokens go to the slots that they are addressed to, and nothing else changes."""

import pytest
import torch
from cases import DTYPE_NAMES, DTYPES, poisoned
from checks import check_exact, check_same_bits
from kv_model import Addressing, KvModel, Rotation, angles, empty_cache, judge_cache

from torch_flash_mps import quantize_kv

ops = torch.ops.flash_mps
HEADS, SLOTS = 2, 32

ADDRESSINGS = {
    "entries": Addressing([5, 29]),
    "empty": Addressing([0, 0], leftpad=[0, 0]),
    "batch_idx": Addressing([7, 12], batch_idx=[3, 1], leftpad=[2, 0]),
    "paged": Addressing([13, 60], block_table=[[6, 2, 0, 5], [1, 4, 7, 3]]),
    "paged-leftpad": Addressing([15, 0], leftpad=[9, 0], block_table=[[2, 0], [7, 3]]),
    # Slots beyond the capacity, pages and entries that do not exist, lengths below 0.
    "overflow": Addressing([30, 200]),
    "paged-overflow": Addressing([60, 14], block_table=[[6, 2, 0, 5], [1, -1, 99, 3]]),
    "wrong-entries": Addressing([3, -4], batch_idx=[9, 1]),
}
# Of cache and tokens. Rows of both, of one or of none start on 16 bytes.
LAYOUTS = [("aligned", "aligned"), ("dense", "aligned"), ("sliced", "aligned"),
           ("aligned", "sliced"), ("heads-first", "strided")]
ROTATIONS = {"plain": None, "pairs": True, "halves": False}


def new_cache(at: Addressing, head_dim: int, dtype: torch.dtype, is_int8: bool) -> KvModel:
    entries, slots = (4, SLOTS) if at.block_table is None else (8, 16)
    return empty_cache(entries, slots, HEADS, head_dim, dtype, head_dim_v=head_dim + 32,
                       is_int8=is_int8)


def lay_out(x: torch.Tensor | None, place: torch.device, layout: str) -> torch.Tensor | None:
    """A cache tensor on a device, as ``[entries, heads, slots(, head_dim)]``."""
    if x is None:
        return None
    if layout == "dense":
        return x.clone().to(place).transpose(1, 2)
    if layout == "heads-first":
        return x.transpose(1, 2).contiguous().to(place)
    return poisoned(x, place, layout).transpose(1, 2)


def margins(view: torch.Tensor) -> torch.Tensor:
    """The bytes of the buffer that a view lies in, those of the view itself zeroed."""
    base = view if view._base is None else view._base
    copy = base.cpu().clone()
    copy.as_strided(view.shape, view.stride(), view.storage_offset()).zero_()
    return copy


def append_and_judge(
    place: torch.device, name: str, rotation_name: str, dtype: torch.dtype, is_int8: bool,
    layouts: tuple[str, str], head_dim: int = 64, table_dtype: torch.dtype | None = None,
) -> None:
    """One call, the cache in the first layout, the tokens in the second, against the model."""
    case_id = f"{name}-{rotation_name}-{DTYPE_NAMES[dtype]}-{is_int8}-{layouts}-{head_dim}"
    at = ADDRESSINGS[name]
    cache = new_cache(at, head_dim, dtype, is_int8)
    cache.fill(at)
    batch, seqlen_new = len(at.lengths), 3
    k = torch.randn(batch, seqlen_new, HEADS, head_dim).to(dtype)
    v = torch.randn(batch, seqlen_new, HEADS, head_dim + 32).to(dtype)
    rotation, named = None, {}
    if ROTATIONS[rotation_name] is not None:
        tables = [x.to(table_dtype or dtype) for x in angles(64, 32)]
        rotation = Rotation(*tables, ROTATIONS[rotation_name])
        named = {"rotary_cos": poisoned(rotation.cos, place),
                 "rotary_sin": poisoned(rotation.sin, place),
                 "rotary_interleaved": rotation.interleaved}
    cache.append(at, k, v, rotation)
    tensors = [lay_out(x, place, layouts[0])
               for x in (cache.key, cache.value, cache.k_scale, cache.v_scale)]
    around = [None if x is None else margins(x) for x in tensors]
    addressing = at.tensors(place)
    addressing["leftpad"] = addressing.pop("cache_leftpad")
    ops.kvcache_append_(
        tensors[0], tensors[1], poisoned(k, place, layouts[1]).transpose(1, 2),
        poisoned(v, place, layouts[1]).transpose(1, 2), k_scale=tensors[2], v_scale=tensors[3],
        seqlens=torch.tensor(at.lengths, dtype=torch.int32).to(place), **addressing, **named,
    )
    now = KvModel(*(None if x is None else x.transpose(1, 2).cpu() for x in tensors))
    judge_cache(now, cache, case_id)
    for tensor, before in zip(tensors, around, strict=True):
        if tensor is not None:
            check_same_bits(margins(tensor), before, f"{case_id}: bytes outside the cache")


@pytest.mark.parametrize("is_int8", [False, True], ids=["same", "int8"])
@pytest.mark.parametrize("name", ADDRESSINGS)
def test_DE_07_append_writes_the_addressed_slots_only(place, name, is_int8):
    append_and_judge(place, name, "plain", torch.float16, is_int8, ("sliced", "sliced"))


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES.get)
@pytest.mark.parametrize("is_int8", [False, True], ids=["same", "int8"])
def test_append_in_every_dtype_and_layout(place, dtype, is_int8, rotation):
    for layouts in LAYOUTS:
        append_and_judge(place, "entries", rotation, dtype, is_int8, layouts)


@pytest.mark.parametrize("name", ["entries", "paged-overflow", "paged-leftpad", "batch_idx"])
@pytest.mark.parametrize("is_int8", [False, True], ids=["same", "int8"])
def test_append_in_checked_mode(device, checked, name, is_int8):
    for layouts, head_dim in ((("aligned", "aligned"), 64), (("sliced", "sliced"), 33)):
        append_and_judge(device, name, "halves", torch.bfloat16, is_int8, layouts, head_dim,
                         torch.float32)


@pytest.mark.parametrize("head_dim", [32, 33, 72, 128, 192, 256, 576])
def test_append_of_head_dims(place, head_dim):
    for is_int8 in (False, True):
        append_and_judge(place, "entries", "pairs", torch.float16, is_int8, ("dense", "aligned"),
                         head_dim)


def test_append_at_a_position_known_here(place):
    cache = empty_cache(2, SLOTS, HEADS, 8, torch.float32)
    k, v = torch.randn(2, 2, 4, HEADS, 8)
    at = Addressing([28, 28])
    cache.append(at, k, v)
    key, value = (x.clone().to(place).transpose(1, 2) for x in (cache.key, cache.value))
    tokens = [x.to(place).transpose(1, 2) for x in (k, v)]
    ops.kvcache_append_(key, value, *tokens, position=28)
    judge_cache(KvModel(key.transpose(1, 2).cpu(), value.transpose(1, 2).cpu()), cache)
    before = key.clone(), value.clone()
    for position, said in ((29, "room for 4 tokens at slot 29, got a capacity of 32"),
                           (-1, "position of 0 or more, got -1")):
        with pytest.raises(RuntimeError, match=f"kvcache_append_: expected {said}"):
            ops.kvcache_append_(key, value, *tokens, position=position)
    check_same_bits(key, before[0])
    check_same_bits(value, before[1])


def test_DE_08_batch_stride_of_2_to_the_30(place):
    # Left uninitialised and hardly touched: addresses only.
    torch.utils.deterministic.fill_uninitialized_memory = False
    strides = (2**30, 2**24, 16, 1)
    buffer = torch.empty(4 * 2**30 + 2**25, dtype=torch.float16, device=place)
    key, value = (buffer.as_strided((5, 2, 8, 16), strides, offset).fill_(-1.0)
                  for offset in (0, 2**23))
    k, v = torch.randn(2, 4, 2, 1, 16).half()
    index = torch.tensor([1, 2, 3, 4], dtype=torch.int32).to(place)
    seqlens = torch.tensor([0, 3, 5, 7], dtype=torch.int32).to(place)
    ops.kvcache_append_(key, value, k.to(place), v.to(place), seqlens=seqlens,
                        cache_batch_idx=index)
    for cache, tokens in ((key, k), (value, v)):
        expected = torch.full((5, 2, 8, 16), -1.0).half()
        for sequence, slot in enumerate((0, 3, 5, 7)):
            expected[sequence + 1, :, slot] = tokens[sequence, :, 0]
        check_same_bits(cache, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES.get)
def test_append_rounds_as_quantize_kv(place, dtype):
    cache = empty_cache(3, 1, HEADS, 40, dtype, is_int8=True)
    k = torch.randn(3, HEADS, 1, 40).to(dtype)
    k[0, 0, 0, 0], k[1, 0, 0, 0], k[2, 0] = torch.nan, torch.inf, 0.0
    key, value, *scales = (x.to(place).transpose(1, 2)
                           for x in (cache.key, cache.value, cache.k_scale, cache.v_scale))
    ops.kvcache_append_(key, value, k.to(place), k.to(place), k_scale=scales[0], v_scale=scales[1])
    integers, scale = quantize_kv(k)
    for got, got_scale in ((key, scales[0]), (value, scales[1])):
        check_exact(got_scale, scale.double(), 1e-9)
        # A tie may fall to either side where a division is not correctly rounded.
        assert (got.cpu().int() - integers.int()).abs().max() <= 1
        check_exact(got[0, 0], 0.0)
        check_exact(got[1, 0], 0.0)


def appended(place, **options):
    """Arguments of the op that fit each other, some replaced."""
    arguments = {
        "key_cache": torch.zeros(2, 2, 32, 8), "value_cache": torch.zeros(2, 2, 32, 8),
        "key": torch.ones(2, 2, 1, 8), "value": torch.ones(2, 2, 1, 8),
        "seqlens": torch.zeros(2, dtype=torch.int32),
    } | options
    return {name: x.to(place) if isinstance(x, torch.Tensor) else x
            for name, x in arguments.items()}


INT8 = {"key_cache": torch.zeros(2, 2, 32, 8, dtype=torch.int8),
        "value_cache": torch.zeros(2, 2, 32, 8, dtype=torch.int8)}
TABLE = torch.zeros(32, 4)
ERRORS = {
    "rank": ({"key_cache": torch.zeros(2, 32, 8)}, r"key cache of rank 4 .* got shape \[2, 32, 8"),
    "heads": ({"key": torch.ones(2, 1, 1, 8), "value": torch.ones(2, 1, 1, 8)},
              r"head count of the cache, 2 \(layout \[B, H, S, D\]\), got 1"),
    "head-dim": ({"key": torch.ones(2, 2, 1, 9)}, "head_dim of key, 9, got head_dim 8"),
    "value": ({"value": torch.ones(2, 2, 2, 8)}, r"value of shape \[2, 2, 1, 8\], got \[2, 2, 2"),
    "dtype": ({"key": torch.ones(2, 2, 1, 8).half(), "value": torch.ones(2, 2, 1, 8).half()},
              "key cache of dtype Half or Char, got Float"),
    "caches": ({"value_cache": torch.zeros(2, 2, 33, 8)}, "key and value cache alike"),
    "strided": ({"key_cache": torch.zeros(2, 2, 8, 32).transpose(2, 3)},
                "key cache with a dense last dimension .* got strides"),
    "no-scale": (INT8, "k_scale with an 8-bit cache, got none"),
    "scale": ({"k_scale": torch.zeros(2, 2, 32)}, "k_scale with an 8-bit cache only, got a cache"),
    "scale-shape": (INT8 | {"k_scale": torch.zeros(2, 32, 2), "v_scale": torch.zeros(2, 2, 32)},
                    r"k_scale of shape \[2, 2, 32\], got \[2, 32, 2\]"),
    "seqlens": ({"seqlens": torch.zeros(2, dtype=torch.int64)}, "seqlens of dtype Int, got Long"),
    "seqlens-shape": ({"seqlens": torch.zeros(3, dtype=torch.int32)}, r"seqlens of shape \[2\]"),
    "entries": ({"key_cache": torch.zeros(1, 2, 32, 8), "value_cache": torch.zeros(1, 2, 32, 8)},
                "at least 2 entries, one for each sequence, got 1"),
    "page-size": ({"key_cache": torch.zeros(2, 2, 24, 8), "value_cache": torch.zeros(2, 2, 24, 8),
                   "block_table": torch.zeros(2, 1, dtype=torch.int32)},
                  "page size that is a multiple of 16, got 24"),
    "two-ways": ({"cache_batch_idx": torch.zeros(2, dtype=torch.int32),
                  "block_table": torch.zeros(2, 1, dtype=torch.int32)},
                 "cache_batch_idx or block_table, got both"),
    "one-table": ({"rotary_cos": TABLE}, "both rotary_cos and rotary_sin or none, got one"),
    "rotary-dim": ({"rotary_cos": torch.zeros(32, 5), "rotary_sin": torch.zeros(32, 5)},
                   "rotary_dim of at most the head_dim of key, 8, got 10"),
    "rotary-rows": ({"rotary_cos": TABLE[:31], "rotary_sin": TABLE[:31]},
                    "a row for each of 32 slots, got 31"),
    "rotary-dtype": ({"rotary_cos": TABLE.half(), "rotary_sin": TABLE.half()},
                     "cos and sin of dtype Float or that of key, Float, got Half"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_append_says_what_does_not_fit(place, name):
    options, said = ERRORS[name]
    arguments = appended(place, **options)
    with pytest.raises(RuntimeError, match=f"kvcache_append_: expected .*{said}"):
        ops.kvcache_append_(**arguments)
    assert not arguments["key_cache"].any() and not arguments["value_cache"].any()


def test_a_gradient_is_refused_where_it_would_be_lost(place):
    arguments = appended(place)
    arguments["key"].requires_grad_()
    with pytest.raises(RuntimeError, match="kvcache_append_: expected key without requires_grad"):
        ops.kvcache_append_(**arguments)
    assert not arguments["key_cache"].any()
    version = arguments["key_cache"]._version
    with torch.no_grad():
        ops.kvcache_append_(**arguments)
    assert arguments["key_cache"][:, :, 0].all() and arguments["key_cache"]._version > version
    cos, sin = (x.to(place) for x in angles(8, 8))
    with pytest.raises(RuntimeError, match="rotary_embedding: expected x without requires_grad"):
        ops.rotary_embedding(arguments["key"], cos, sin)


@pytest.mark.parametrize("kind", ["plain", "int8", "paged"])
def test_PY_09_opcheck_of_append(place, kind):
    options = {"rotary_cos": TABLE, "rotary_sin": TABLE}
    if kind == "int8":
        options |= INT8 | {"k_scale": torch.zeros(2, 2, 32), "v_scale": torch.zeros(2, 2, 32)}
    elif kind == "paged":
        options |= {"block_table": torch.tensor([[1], [0]], dtype=torch.int32)}
    result = torch.library.opcheck(ops.kvcache_append_.default, (), appended(place, **options))
    assert set(result.values()) == {"SUCCESS"}
