"""Windows, softcap, ALiBi and sinks where few rows read many keys, in one split or in several."""

import math

import pytest
import torch
from cases import DTYPE_NAMES, DTYPES, Case, make_inputs, ramp
from checks import check, check_exact, check_same_bits
from decoding import ENTRIES, MAX_ROWS, causal_offset, check_decode, decode
from kv_model import Addressing, empty_cache
from test_score_options import EVERYTHING

from torch_flash_mps.flash_attn import flash_attn_with_kvcache
from torch_flash_mps.reference import attention_ref, visible_pairs

INF = math.inf
WITH_KVCACHE = torch.ops.flash_mps.attention_with_kvcache


@pytest.fixture(params=ENTRIES.values(), ids=ENTRIES.keys())
def entry(request) -> int | None:
    return request.param


def check_scored(entry, case: Case, place: torch.device, seed: int = 0) -> None:
    inputs = make_inputs(case, place, seed)
    check_decode(entry, *inputs.operands, **inputs.options, case_id=f"{case.id} {entry}")


OPTIONS = (
    {"window": (5, 9)},
    {"window": (0, -1), "causal": True, "mask": "bool"},
    {"softcap": 1.5, "mask": "float_heads"},
    {"alibi": "batch", "causal": True},
    {"sinks": True, "mask": "bool_rows"},
    EVERYTHING | {"mask": "float"},
)


@pytest.mark.parametrize("place_name", ["mps", "cpu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES.get)
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_cases(device, entry, place_name, dtype, rows):
    for options in OPTIONS:
        case = Case(2, 6, 2, rows, 150, 40, dtype=dtype, layout="aligned", **options)
        check_scored(entry, case, torch.device(place_name))


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES.get)
@pytest.mark.parametrize("head_dim", [64, 128, 256, 576])
def test_checked_and_shuffled(device, checked, seed, entry, dtype, head_dim):
    case = Case(1, 6, 2, 3, 70, head_dim, dtype=dtype, layout="aligned", mask="bool", causal=True,
                **EVERYTHING)
    check_scored(entry, case, device, seed)


@pytest.mark.parametrize("seqlen_k", [1, 3, 700])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES.get)
def test_KF_25_a_sink_counts_once_whatever_the_splits(place, dtype, seqlen_k):
    q, k = torch.zeros(2, 6, 2, 8), torch.ones(2, 2, seqlen_k, 8)
    sinks = torch.tensor([0.0, math.log(5), -INF, 80.0, -80.0, 11.0])
    weight = sinks.double().exp()
    for num_splits in (0, 1, 2, 7, 33, 128):
        out, lse = WITH_KVCACHE(*(x.to(place, dtype) for x in (q, k, 3 * k)),
                                num_splits=num_splits, sinks=sinks.to(place, dtype))
        exact = weight if dtype == torch.float32 else sinks.to(dtype).double().exp()
        expected = (3 * seqlen_k / (seqlen_k + exact))[None, :, None, None].expand(2, 6, 2, 8)
        check_exact(out, expected, 4 * torch.finfo(dtype).eps + 1e-7 * seqlen_k)
        check_exact(lse, torch.log(seqlen_k + exact)[:, None].expand(2, 6, 2), 2e-5)


@pytest.mark.parametrize("sinks", [None, 0.0, -INF, 80.0])
def test_KF_25_DE_05_no_key_in_any_split(place, entry, sinks):
    q, k = torch.ones(1, 2, 3, 8).to(place), torch.ones(1, 2, 300, 8).to(place)
    mask = torch.zeros(3, 300, dtype=torch.bool)
    mask[1, 299] = True
    options = {} if sinks is None else {"sinks": torch.full((2,), sinks).to(place)}
    out, lse = decode(entry, q, k, k, attn_mask=mask.to(place), **options)
    alone = -INF if sinks is None else sinks
    check_exact(lse[:, :, [0, 2]], alone)
    check_exact(out[:, :, [0, 2]], 0.0)
    assert torch.isfinite(lse[:, :, 1]).all() and torch.isfinite(out).all()


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("window", [(0, 0), (3, -1), (40, 2), (-1, 0), (-1, 5), (10**6, 10**6)])
def test_IN_03_DE_05_windows_leave_splits_without_a_key(place, entry, rows, window):
    q, k, v = (x.to(place) for x in ramp(rows, 200))
    left, right = window
    for is_causal in (False, True):
        out, lse = decode(entry, q, k, v, is_causal=is_causal, window_left=left,
                          window_right=right)
        visible = visible_pairs(rows, 200, is_causal=is_causal, window_left=left,
                                window_right=right,
                                causal_offset=causal_offset(entry, rows, 200)).double()
        count = visible.sum(1)
        means = (visible @ torch.arange(200).double()) / count
        check_exact(out[0, 0, :, 0], means, 1e-4)
        check_exact(lse[0, 0].exp(), count, 1e-3)


@pytest.mark.parametrize("is_cached", [False, True])
def test_windows_reach_the_keys_of_queries_before_the_first(place, is_cached):
    """16 queries on 3 keys: the first stands 13 keys before them, the window reaches over."""
    q, k, v = (x.to(place) for x in ramp(16, 3))
    lengths = {"seqlens_k": torch.tensor([3], dtype=torch.int32).to(place)} if is_cached else {}
    for window in ((-1, 14), (14, 14), (20, 20), (2, 0)):
        named = dict(zip(("window_left", "window_right"), window, strict=True))
        out, lse = WITH_KVCACHE(q, k, v, **lengths, **named)
        ref, ref_lse = attention_ref(q, k, v, causal_offset=-13, **named)
        check_exact(out, ref, 1e-6)
        check_exact(lse, ref_lse, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES.get)
def test_keys_outside_the_windows_are_not_read(place, entry, dtype):
    rows, seqlen_k = 3, 300
    q, k, v = make_inputs(Case(1, 4, 2, rows, seqlen_k, 64, dtype=dtype)).operands
    options = {"window_left": 21, "window_right": 2, "softcap": 3.0}
    visible = visible_pairs(rows, seqlen_k, causal_offset=causal_offset(entry, rows, seqlen_k),
                            window_left=21, window_right=2).any(0)
    results = []
    for poison in (0.0, math.nan, INF):
        keys, values = (x.masked_fill(~visible[:, None], poison).to(place) for x in (k, v))
        results.append(decode(entry, q.to(place), keys, values, **options))
    for result in results[1:]:
        for got, clean in zip(result, results[0], strict=True):
            assert torch.isfinite(got).all()
            check_same_bits(got, clean)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES.get)
def test_the_forward_kernel_agrees(device, entry, dtype):
    """One row more than the decode kernel takes, at the same positions."""
    inputs = make_inputs(Case(2, 6, 2, MAX_ROWS + 1, 180, 64, dtype=dtype, layout="aligned",
                              softcap=2.0, alibi="batch", sinks=True, window=(30, 20)), device)
    q, k, v = inputs.operands
    many = decode(None, q, k, v, **inputs.options)
    few = decode(None, q[:, :, :MAX_ROWS], k, v, **inputs.options)
    for got, expected in zip(few, many, strict=True):
        check_exact(got, expected[:, :, :MAX_ROWS], 8 * torch.finfo(got.dtype).eps + 2e-6)


AT = {
    "dense": Addressing([40, 3, 61]),
    "leftpad": Addressing([40, 3, 61], leftpad=[7, 0, 60]),
    "batch-idx": Addressing([40, 3, 61], batch_idx=[2, 0, 1]),
    "paged": Addressing([40, 3, 61], block_table=[[5, 0, 8, -1], [1, -1, -1, -1], [3, 7, 2, 11]]),
}


@pytest.mark.parametrize(
    ("name", "dtype", "is_int8"),
    [("dense", torch.float32, False), ("dense", torch.float16, True),
     ("leftpad", torch.bfloat16, False), ("leftpad", torch.float32, True),
     ("batch-idx", torch.float16, False), ("batch-idx", torch.bfloat16, True),
     ("paged", torch.float32, False), ("paged", torch.float16, True)],
)
def test_each_sequence_has_its_own_positions(place, name, dtype, is_int8):
    """attention_with_kvcache and flash_attn_with_kvcache: all options over lengths of their own."""
    at = AT[name]
    shape = (12, 16) if name == "paged" else (3, 64)
    cache = empty_cache(*shape, 2, 24, dtype, is_int8=is_int8)
    cache.fill(at)
    tensors = [None if x is None else x.to(place)
               for x in (cache.key, cache.value, cache.k_scale, cache.v_scale)]
    lengths = torch.tensor(at.lengths, dtype=torch.int32).to(place)
    scores = {"softcap": 1.5, "alibi_slopes": torch.rand(3, 4)}
    on = {"softcap": 1.5, "alibi_slopes": scores["alibi_slopes"].to(place)}
    sinks = torch.tensor([0.0, 2.0, -INF, 80.0]).to(dtype)
    for rows, causal, (left, right) in ((1, True, (9, -1)), (4, False, (-1, 0)),
                                        (20, True, (9, 3))):
        case_id = f"{rows} rows, causal={causal}, window {left} {right}"
        q = torch.randn(3, rows, 4, 24).to(dtype)
        window = {"window_left": left, "window_right": right}
        out, lse = flash_attn_with_kvcache(
            q.to(place), *tensors[:2], k_scale=tensors[2], v_scale=tensors[3],
            cache_seqlens=lengths, causal=causal, window_size=(left, right),
            return_softmax_lse=True, **on, **at.tensors(place))
        judge(cache, at, q, causal, out, lse, case_id, **window, **scores)
        where = {key.replace("cache_leftpad", "leftpad_k"): x
                 for key, x in at.tensors(place).items()}
        heads_first = [None if x is None else x.transpose(1, 2) for x in tensors]
        for num_splits in (1, 5):
            out, lse = WITH_KVCACHE(
                q.transpose(1, 2).to(place), *heads_first[:2], None, causal,
                k_scale=heads_first[2], v_scale=heads_first[3], seqlens_k=lengths,
                num_splits=num_splits, sinks=sinks.to(place), **window, **on, **where)
            judge(cache, at, q, causal, out.transpose(1, 2), lse, f"{case_id}, {num_splits} splits",
                  sinks=sinks, **window, **scores)


def judge(cache, at, q, causal, out, lse, case_id, **options):
    ref, ref_lse = cache.attend(at, q, causal, **options)
    lowp, _ = cache.attend(at, q, causal, q.dtype, **options)
    check(out, ref, lowp, case_id=case_id)
    check_exact(lse, ref_lse, 2e-5, case_id)
