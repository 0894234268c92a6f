"""The host side of decoding: routing, splits, memory, gradients, threads, torch.compile."""

import math
import threading

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES, Case, make_inputs
from checks import check_exact, check_same_bits
from decoding import ENTRIES, check_decode, decode
from test_flash_fwd_host import EMPTY

import torch_flash_mps
from torch_flash_mps.reference import attention_ref


@pytest.fixture(params=ENTRIES.values(), ids=ENTRIES.keys())
def entry(request) -> int | None:
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
def test_HD_15_dirty_memory_changes_nothing(device, entry, dtype):
    inputs = make_inputs(Case(1, 6, 2, 3, 700, 64, dtype=dtype, mask="bool"), device)
    inputs.attn_mask[:, :, 1] = False
    inputs.attn_mask[:, :, 2, 100:] = False
    first = decode(entry, *inputs.operands, attn_mask=inputs.attn_mask)
    for _ in range(30):
        for elements in (6 * 3 * 64, 6 * 3, 5 * 6 * 3 * 64, 5 * 6 * 3, 5 * 6 * 3 * 66):
            for kind in (dtype, torch.float32):
                torch.full((elements,), torch.nan, device=device, dtype=kind)
        again = decode(entry, *inputs.operands, attn_mask=inputs.attn_mask)
        for one, other in zip(again, first, strict=True):
            assert not torch.isnan(one).any()
            check_same_bits(one, other)


@pytest.mark.parametrize("operand", range(3), ids=["query", "key", "value"])
def test_HD_11_offsets_beyond_2_to_the_31_elements(device, entry, operand):
    # Left uninitialised and hardly touched: 4 GiB of addresses.
    torch.utils.deterministic.fill_uninitialized_memory = False
    batch_stride = 2**31 + 64
    for shape, strides in (((2, 1, 3, 8), (batch_stride, 32, 8, 1)),
                           ((1, 2, 3, 8), (32, batch_stride, 8, 1)),
                           ((1, 1, 2, 8), (32, 32, batch_stride, 1))):
        operands = [torch.randn(shape, dtype=torch.float16) for _ in range(3)]
        on_device = [x.to(device) for x in operands]
        far = torch.empty(batch_stride + 32, dtype=torch.float16, device=device)
        on_device[operand] = far.as_strided(shape, strides).copy_(operands[operand])
        check_exact(decode(entry, *on_device)[0], attention_ref(*operands)[0], 2e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", range(1, 9))
def test_any_storage_offset(device, entry, dtype, offset):
    values = torch.randn(2000).to(device, dtype)
    q, k, v = (values[offset + i :].as_strided((1, 1, 9, 24), (0, 0, 24, 1)) for i in range(3))
    check_decode(entry, q, k, v, case_id=f"offset {offset}")
    overlapping = [values[offset + i :].as_strided((1, 2, 7, 16), (0, 40, 3, 1)) for i in range(3)]
    check_decode(entry, *overlapping, case_id=f"overlapping, offset {offset}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_HD_10_strides_of_size_1_dimensions_mean_nothing(device, entry, dtype):
    plain = [torch.randn(1, 1, seqlen, 16).to(device, dtype) for seqlen in (1, 17, 17)]
    odd = [x.as_strided(x.shape, (2**33, 7, 16, 1)) for x in plain]
    odd[0] = plain[0].as_strided((1, 1, 1, 16), (2**33, 2**40, 0, 1))
    for got, expected in zip(decode(entry, *odd), decode(entry, *plain), strict=True):
        check_same_bits(got, expected)
    assert torch_flash_mps.explain(*odd) == torch_flash_mps.explain(*plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EMPTY)
def test_HD_09_empty_sizes(device, entry, name, dtype):
    q, k, v = (torch.ones(shape, dtype=dtype) for shape in EMPTY[name])
    out, lse = decode(entry, *(x.to(device) for x in (q, k, v)), scale=0.0)
    check_exact(out, F.scaled_dot_product_attention(q, k, v), 1e-6)
    assert lse.shape == q.shape[:-1]
    check_exact(lse, math.log(k.shape[2]) if k.shape[2] else -math.inf, 1e-6)


def test_HD_03_threads_at_once(device, entry):
    failures = []

    def attend(seqlen_k):
        q, k, v = make_inputs(Case(2, 4, 2, 1 + seqlen_k % 3, seqlen_k)).operands
        expected, _ = attention_ref(q, k, v)
        for _ in range(20):
            check_exact(decode(entry, *(x.to(device) for x in (q, k, v)))[0], expected, 1e-5)

    def run(seqlen_k):
        try:
            attend(seqlen_k)
        except BaseException as error:   # noqa: BLE001, a thread has nobody else to tell
            failures.append(error)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in (9, 130, 300, 701)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "a thread hangs"
    assert not failures, failures


def test_HD_12_a_new_length_never_means_a_new_kernel(device, simulator):
    k = torch.zeros(1, 1, 4096, 64, device=device)
    q = k[:, :, :1]

    def attend(seqlen_k):
        decode(None, q, k[:, :, :seqlen_k], k[:, :, :seqlen_k])
        torch.mps.synchronize()

    attend(1)
    attend(4096)
    pipelines = simulator.stats()["pipelines_built"] if simulator else 0
    memory = torch.mps.driver_allocated_memory()
    for seqlen_k in (*range(2, 400, 3), *range(500, 4097, 311)):
        attend(seqlen_k)
    if simulator:
        assert simulator.stats()["pipelines_built"] == pipelines
    assert torch.mps.driver_allocated_memory() - memory < 2**20
