"""The host side of the forward op: empty and odd tensors, ranks, dirty memory, threads, streams."""

import itertools
import threading

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES, Case, make_inputs
from checks import check_attention, check_exact, check_same_bits

import torch_flash_mps


def attention(*operands, **options):
    return torch.ops.flash_mps.attention(*operands, **options)


EMPTY = {
    "B=0": ((0, 2, 4, 8), (0, 2, 5, 8), (0, 2, 5, 8)),
    "Hq=0": ((1, 0, 4, 8), (1, 0, 5, 8), (1, 0, 5, 8)),
    "Sq=0": ((1, 2, 0, 8), (1, 2, 5, 8), (1, 2, 5, 8)),
    "Sk=0": ((1, 2, 3, 8), (1, 2, 0, 8), (1, 2, 0, 8)),
    "Sq=Sk=0": ((1, 2, 0, 8), (1, 2, 0, 8), (1, 2, 0, 8)),
    "D=0": ((1, 2, 3, 0), (1, 2, 4, 0), (1, 2, 4, 5)),
    "Dv=0": ((1, 2, 3, 8), (1, 2, 4, 8), (1, 2, 4, 0)),
}


@pytest.mark.parametrize("where", ["mps", "cpu"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EMPTY)
def test_HD_09_empty_sizes_behave_as_torch(device, where, name, dtype, masked):
    place = device if where == "mps" else "cpu"
    q, k, v = (torch.ones(shape, dtype=dtype) for shape in EMPTY[name])
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool) if masked else None
    there = None if mask is None else mask.to(place)
    out, lse = torch_flash_mps.attention(
        *(x.to(place) for x in (q, k, v)), attn_mask=there, return_lse=True
    )
    expected = F.scaled_dot_product_attention(q, k, v, mask)
    assert out.shape == expected.shape and out.dtype == dtype
    check_exact(out, expected, 1e-6)
    assert lse.shape == q.shape[:-1] and lse.dtype == torch.float32
    alone = attention(*(x.to(place) for x in (q, k, v)), there)
    check_exact(alone, expected, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_HD_10_strides_of_size_1_dimensions_mean_nothing(device, dtype):
    q, k, v = make_inputs(Case(1, 1, 1, 9, 17, 16, dtype=dtype)).operands
    q, k, v = (x.contiguous().to(device) for x in (q, k, v))
    plain = attention(q, k, v)
    odd = [x.as_strided(x.shape, (2**33, 7, 16, 1)) for x in (q, k, v)]
    check_same_bits(attention(*odd), plain)
    assert torch_flash_mps.explain(*odd) == torch_flash_mps.explain(q, k, v)
    one_row = q[:, :, :1].as_strided((1, 1, 1, 16), (2**33, 2**40, 0, 1))
    check_same_bits(attention(one_row, k, v), attention(q[:, :, :1].contiguous(), k, v))


def test_HD_10_broadcast_operands_are_read_by_stride(device):
    q, k, v = make_inputs(Case(1, 1, 1, 9, 17, 16)).operands
    q = torch.cat([q] * 2).to(device)
    k, v = (x.to(device).expand(2, 3, -1, -1) for x in (k, v))
    check_attention(q.expand(2, 3, -1, -1), k, v)


def test_strides_below_the_row_length_overlap(device):
    buffer = torch.randn(200, device=device)
    q, k, v = (buffer[i:].as_strided((1, 2, 7, 16), (0, 40, 3, 1)) for i in range(3))
    check_attention(q, k, v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", range(1, 9))
def test_any_storage_offset(device, dtype, offset):
    values = torch.randn(2000).to(device, dtype)
    q, k, v = (values[offset + i :].as_strided((1, 1, 11, 24), (0, 0, 24, 1)) for i in range(3))
    check_attention(q, k, v, case_id=f"offset {offset}")


def test_a_width_of_32_with_rows_of_43_elements(device):
    inputs = make_inputs(Case(1, 2, 2, 9, 5, 32), device)
    for width in (8, 43):
        mask = torch.randn(9, width).to(device)[:, :5]
        check_attention(*inputs.operands, attn_mask=mask)
        check_attention(*inputs.operands, attn_mask=mask > 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_HD_08_float32_mask_is_added_in_float32(device, dtype):
    q, k, v = make_inputs(Case(1, 1, 1, 4, 8, 8, dtype=dtype), device).operands
    # These differ by 1/32: rounding the sum to either half precision would lose it.
    mask = (4096 + torch.arange(8) / 32).reshape(1, 1, 1, 8).to(device)
    out = attention(q, k, v, mask, scale=0.0)
    weights = torch.softmax(torch.arange(8, dtype=torch.float64) / 32, 0)
    check_exact(out, (weights @ v.cpu().double()).unsqueeze(-2).expand(1, 1, 4, 8), 8e-3)


def test_uninitialised_memory_is_full_of_nan(device):
    assert torch.isnan(torch.empty(100, device=device)).all()
    assert torch.isnan(torch.empty_strided((3, 5), (5, 1), device=device)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_HD_15_dirty_memory_changes_nothing(device, dtype):
    case = Case(1, 2, 1, 37, 70, 64, dtype=dtype, causal=True, mask="bool")
    inputs = make_inputs(case, device)
    mask = inputs.attn_mask.clone()
    mask[:, :, 5] = False
    first = None
    for _ in range(30):
        for elements in (first.numel() if first is not None else 37 * 2 * 64, 37 * 2, 70 * 64):
            torch.full((elements,), torch.nan, device=device, dtype=dtype)
            torch.full((elements,), torch.nan, device=device, dtype=torch.float32)
        out, lse = torch_flash_mps.attention(
            *inputs.operands, attn_mask=mask, is_causal=True, enable_gqa=True, return_lse=True
        )
        assert not torch.isnan(out).any() and not torch.isnan(lse).any()
        if first is None:
            first = out
        check_same_bits(out, first)
        check_same_bits(
            attention(*inputs.operands, mask, is_causal=True, enable_gqa=True), first
        )


@pytest.mark.parametrize("masked", [False, True])
def test_KF_06_no_score_matrix_is_ever_allocated(device, masked):
    q, k, v = make_inputs(Case(1, 1, 1, 1024, 1024, 64, dtype=torch.float16), device).operands
    mask = torch.ones(1, 1024, dtype=torch.bool, device=device) if masked else None
    attention(q, k, v, mask)
    torch.mps.synchronize()
    torch.mps.empty_cache()
    before = torch.mps.driver_allocated_memory()
    out, lse = torch_flash_mps.attention(q, k, v, attn_mask=mask, return_lse=True)
    extra = torch.mps.driver_allocated_memory() - before - out.nbytes - lse.nbytes
    torch.mps.synchronize()
    assert extra < 1024 * 1024   # a byte for each score


RANKS = {
    "rank 2": ((5, 8), (7, 8), (7, 8)),
    "rank 3": ((3, 5, 8), (3, 7, 8), (3, 7, 6)),
    "rank 5": ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 8)),
    "rank 6": ((1, 2, 3, 2, 5, 8), (1, 2, 3, 2, 7, 8), (1, 2, 3, 2, 7, 8)),
    "rank 3 on rank 4": ((1, 1, 64), (2, 1, 1, 64), (2, 1, 1, 64)),
    "rank 2 on rank 3": ((5, 8), (4, 7, 8), (4, 7, 8)),
    "batch of 1 on 3": ((1, 2, 5, 8), (3, 2, 7, 8), (3, 2, 7, 8)),
    "batch of 3 on 1": ((3, 2, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8)),
    "rank 5 on batch 1": ((2, 3, 4, 5, 8), (1, 3, 4, 7, 8), (2, 1, 4, 7, 8)),
}


@pytest.mark.parametrize("where", ["mps", "cpu"])
@pytest.mark.parametrize("name", RANKS)
def test_HD_16_other_ranks_and_broadcasting(device, where, name):
    q, k, v = (torch.randn(shape) for shape in RANKS[name])
    place = device if where == "mps" else "cpu"
    expected = F.scaled_dot_product_attention(q, k, v)
    out = attention(*(x.to(place) for x in (q, k, v)))
    assert out.shape == expected.shape
    check_exact(out, expected, 2e-6, case_id=name)
    _, lse = torch_flash_mps.attention(*(x.to(place) for x in (q, k, v)), return_lse=True)
    assert lse.shape == expected.shape[:-1]


@pytest.mark.parametrize("where", ["mps", "cpu"])
@pytest.mark.parametrize("name", ["rank 2", "rank 3", "rank 5", "batch of 1 on 3"])
def test_HD_16_masks_of_other_ranks(device, where, name):
    q, k, v = (torch.randn(shape) for shape in RANKS[name])
    place = device if where == "mps" else "cpu"
    full = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2]) + (q.shape[-2], k.shape[-2])
    shapes = {full, full[-2:], (1, full[-1]), (full[-2], 1), (*[1] * (len(full) - 2), *full[-2:])}
    for shape in sorted(shapes):
        mask = torch.rand(shape) < 0.7
        mask[..., 0] = True
        expected = F.scaled_dot_product_attention(q, k, v, mask)
        out = attention(*(x.to(place) for x in (q, k, v, mask)))
        check_exact(out, expected, 2e-6, case_id=f"{name}, mask {shape}")


def test_HD_16_every_broadcast_of_a_mask(device):
    case = Case(2, 4, 2, 9, 21)
    inputs = make_inputs(case, device)
    for dims in itertools.product((False, True), repeat=4):
        full = zip((2, 4, 9, 21), dims, strict=True)
        shape = [size if kept else 1 for size, kept in full]
        mask = torch.randn(shape)
        check_attention(*inputs.operands, attn_mask=mask.to(device), case_id=str(shape))
        check_attention(*inputs.operands, attn_mask=(mask < 1).to(device), case_id=str(shape))


def test_HD_17_copies_without_waiting_keep_their_order(device):
    q, k, v = make_inputs(Case(1, 2, 2, 9, 33)).operands
    there = [x.to(device) for x in (q, k, v)]
    for scale in (1.0, 2.0, 3.0):
        there[1] = (k * scale).to(device, non_blocking=True)
        result = attention(*there)
        there[1].fill_(torch.nan)
        copied = result.to("cpu", non_blocking=True)
        torch.mps.synchronize()
        expected = F.scaled_dot_product_attention(q, k * scale, v)
        check_exact(copied, expected, 2e-5)


def test_the_result_is_ordered_with_torch_ops_on_both_sides(device):
    x = torch.randn(1, 2, 17, 64)
    expected, got = x, x.to(device)
    for _ in range(5):
        expected = F.scaled_dot_product_attention(expected * 3, expected, expected) + 0.1
        got = attention(got * 3, got, got) + 0.1
    check_exact(got, expected, 1e-5)


def test_HD_03_two_threads_at_once(device):
    failures = []

    def attend(seqlen):
        q, k, v = make_inputs(Case(1, 2, 2, seqlen, 2 * seqlen, 16 + 8 * (seqlen % 3))).operands
        expected = F.scaled_dot_product_attention(q, k, v)
        for _ in range(20):
            check_exact(attention(*(x.to(device) for x in (q, k, v))), expected, 1e-5)

    def other_work(size):
        x = torch.randn(size, size)
        for _ in range(20):
            check_exact((x.to(device) @ torch.eye(size, device=device)).cpu() + 0.0, x, 1e-6)
            assert torch.arange(size, device=device).sum().item() == size * (size - 1) // 2

    def run(work, argument):
        try:
            work(argument)
        except BaseException as error:   # noqa: BLE001, a thread has nobody else to tell
            failures.append(error)

    threads = [
        threading.Thread(target=run, args=job, daemon=True)
        for job in ((attend, 9), (attend, 20), (other_work, 40), (other_work, 33))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "a thread hangs"
    assert not failures, failures
