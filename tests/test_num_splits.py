"""How many splits the keys get: the pure function, the lengths where it changes, what runs."""

import itertools
import sys
import time

import pytest
import torch
from cases import DTYPES, Case, make_inputs
from checks import check_same_bits
from decoding import MAX_ROWS, check_decode, decode
from hypothesis import given, settings
from hypothesis import strategies as st
from test_flash_fwd import SAME_EVERY_TIME

from torch_flash_mps import explain
from torch_flash_mps._extension import extension

FULL_SIZE = sys.platform == "darwin"
# Family and cores of M1, M1 Max, M1 Ultra, M2, M2 Max, M3, M3 Max, M4, M4 Max, M5.
GPUS = [(7, 8), (7, 32), (7, 64), (8, 10), (8, 38), (9, 10), (9, 40), (9, 10), (9, 40), (10, 10)]


def num_splits(batch: int, num_heads_kv: int, seqlen_k: int, family: int, cores: int) -> int:
    return extension().num_splits(batch, num_heads_kv, seqlen_k, family, cores)


@pytest.mark.parametrize(("family", "cores"), GPUS)
@pytest.mark.parametrize("num_heads_kv", [1, 8])
def test_DE_11_a_long_cache_fills_the_gpu(num_heads_kv, family, cores):
    assert num_heads_kv * num_splits(1, num_heads_kv, 8192, family, cores) >= cores


SIZES = {"batch": st.integers(1, 64), "heads": st.integers(1, 64),
         "seqlen_k": st.one_of(st.integers(1, 300), st.integers(1, 2**20)),
         "gpu": st.sampled_from(GPUS)}


@settings(SAME_EVERY_TIME, max_examples=500)
@given(**SIZES)
def test_no_split_is_empty(batch, heads, seqlen_k, gpu):
    assert 1 <= num_splits(batch, heads, seqlen_k, *gpu) <= seqlen_k


@settings(SAME_EVERY_TIME, max_examples=500)
@given(**SIZES, more=st.integers(1, 1000))
def test_splits_grow_with_the_need(batch, heads, seqlen_k, gpu, more):
    family, cores = gpu
    splits = num_splits(batch, heads, seqlen_k, family, cores)
    assert num_splits(batch, heads, seqlen_k + more, family, cores) >= splits
    assert num_splits(batch, heads, seqlen_k, family, cores + more) >= splits
    assert num_splits(batch + more, heads, seqlen_k, family, cores) <= splits
    assert num_splits(batch, heads + more, seqlen_k, family, cores) <= splits
    assert num_splits(heads, batch, seqlen_k, family, cores) == splits


def thresholds(num_heads_kv: int, end: int, family: int, cores: int) -> list[int]:
    """The lengths below `end` at which the number of splits changes."""
    splits = [num_splits(1, num_heads_kv, seqlen_k, family, cores) for seqlen_k in range(1, end)]
    return [i + 2 for i, pair in enumerate(itertools.pairwise(splits)) if pair[0] != pair[1]]


@pytest.mark.parametrize("heads", [(8, 1), (8, 8)], ids=str)
def test_DE_04_around_every_threshold(device, heads):
    gpu = extension().gpu_family(), extension().gpu_cores()
    begins = thresholds(heads[1], 4200, *gpu)
    assert begins, "expected a length at which the keys are split"
    lengths = sorted({begin + i for begin in begins for i in (-2, -1, 0, 1, 2) if begin + i > 0})
    case = Case(1, *heads, 1, lengths[-1], 16, dtype=torch.float16, layout="aligned")
    q, k, v = make_inputs(case, device).operands
    seen = set()
    for seqlen_k in lengths:
        operands = q, k[:, :, :seqlen_k], v[:, :, :seqlen_k]
        got = check_decode(None, *operands, case_id=f"{seqlen_k} keys")
        for one, other in zip(got, decode(None, *operands), strict=True):
            check_same_bits(one, other)
        seen.add(explain(*operands, enable_gqa=True)["num_splits"])
        assert num_splits(1, heads[1], seqlen_k, *gpu) in seen
    assert len(seen) == len(begins) + 1


def test_keys_outside_every_window_make_no_splits(device, on_cores):
    on_cores(16)
    gpu = extension().gpu_family(), extension().gpu_cores()
    q, k, v = make_inputs(Case(1, 1, 1, 3, 4096, 16, dtype=torch.float16), device).operands

    def splits(**options):
        return explain(q, k, v, **options)["num_splits"]

    # Of the three queries, which stand at keys 0, 1 and 2, the last sees the farthest key.
    for right in (0, 100, 255, 1000, 4090, 5000):
        keys = min(right + 3, 4096)
        assert splits(window_right=right) == num_splits(1, 1, keys, *gpu)
    assert splits(window_left=5) == splits() == num_splits(1, 1, 4096, *gpu)
    assert splits(is_causal=True) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["apple7", "apple9", "apple10"])
@pytest.mark.parametrize("cores", [1, 16, 80])
def test_every_gpu(device, checked, on_family, on_cores, family, cores, dtype):
    if not (on_family(family) and on_cores(cores)):
        return   # a Mac has one GPU
    seen = set()
    for rows, seqlen_k in ((1, 100), (2, 300), (1, 1500), (MAX_ROWS, 700)):
        case = Case(1, 3, 1, rows, seqlen_k, 64, dtype=dtype, layout="aligned")
        inputs = make_inputs(case, device)
        check_decode(None, *inputs.operands, case_id=case.id)
        splits = explain(*inputs.operands, enable_gqa=True)["num_splits"]
        assert splits == num_splits(1, 1, seqlen_k, int(family[5:]), cores)
        seen.add(splits)
    assert 1 in seen and 2 in seen and (max(seen) > 4) == (cores > 1)


def seconds(call) -> float:
    def once() -> float:
        begin = time.perf_counter()
        for _ in range(20):
            call()
        torch.mps.synchronize()
        return (time.perf_counter() - begin) / 20

    warm = time.perf_counter() + 1.0
    while time.perf_counter() < warm:
        once()
    return sorted(once() for _ in range(9))[4]


def bytes_read(simulator, call) -> int:
    with simulator.checks():
        simulator.reset_counters()
        call()
        return sum(counts["device_bytes_read"] for counts in simulator.counters())


def test_DE_11_fewer_kv_heads_are_never_slower(device, simulator):
    """Seconds of 32768 keys on a Mac, bytes of 1024 keys on the simulated device."""
    seqlen_k, head_dim = (32768, 128) if FULL_SIZE else (1024, 64)
    cost = []
    for kv_heads in (32, 8, 4, 2, 1):
        case = Case(1, 32, kv_heads, 1, seqlen_k, head_dim, dtype=torch.bfloat16, layout="aligned")
        operands = make_inputs(case, device).operands
        if FULL_SIZE:
            cost.append(seconds(lambda x=operands: decode(None, *x)))
        else:
            cost.append(bytes_read(simulator, lambda x=operands: decode(None, *x)))
            splits = explain(*operands, enable_gqa=True)["num_splits"]
            scratch = splits * 32 * (head_dim + 2) * 4
            q, k, _ = (operand.nbytes for operand in operands)
            assert cost[-1] <= 1.02 * (splits * q + 2 * k) + scratch
            assert kv_heads * splits >= extension().gpu_cores()
    for more_heads, fewer_heads in itertools.pairwise(cost):
        assert fewer_heads <= 1.05 * more_heads
