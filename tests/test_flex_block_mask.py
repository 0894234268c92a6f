"""PyTorch's BlockMask as it is: blocks it leaves out, full ones, partial ones; any BLOCK_SIZE."""

import pytest
import torch
from checks import check, check_same_bits
from flex_cases import plain_attention
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from torch_flash_mps import flex_attention
from torch_flash_mps.flex.block_classes import HIDDEN, MIXED, OPEN, block_classes


def lists(dense):
    """kv_num_blocks and kv_indices of a table of the blocks that are in."""
    order = torch.argsort(dense.int(), dim=-1, descending=True, stable=True)
    return dense.sum(-1).to(torch.int32), order.to(torch.int32)


def mask_of(kinds, device, block, seqlens, mask_mod):
    """A BlockMask whose blocks are hidden, partial or full by `kinds` [B, H, rows, columns]."""
    kinds = kinds.to(device)
    partial, full = lists(kinds == MIXED), lists(kinds == OPEN)
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=block, mask_mod=mask_mod,
                                    seq_lengths=seqlens)


def visible(kinds, block, seqlens, mask_mod):
    """[2, 4, Sq, Sk]: what such a mask says of each pair."""
    of_pairs = kinds.expand(2, 4, -1, -1)
    of_pairs = of_pairs.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    of_pairs = of_pairs[..., : seqlens[0], : seqlens[1]]
    pair = torch.meshgrid(*(torch.arange(n) for n in of_pairs.shape), indexing="ij")
    return (of_pairs == OPEN) | ((of_pairs == MIXED) & mask_mod(*pair))


def kinds_of(shape, seed):
    return torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(seed))


def odd(b, h, q, k):
    return (q + k + h) % 3 != 0


@pytest.mark.parametrize("where", ["mps", "cpu"])
@pytest.mark.parametrize(
    "block, seqlens, shared",
    [((32, 32), (100, 70), (2, 4)), ((64, 128), (130, 260), (1, 4)), ((96, 32), (100, 100), (2, 1)),
     ((128, 128), (129, 127), (1, 1))], ids=str)
def test_blocks_are_those_of_the_mask(device, where, block, seqlens, shared):
    rows, columns = (-(-seqlen // size) for seqlen, size in zip(seqlens, block, strict=True))
    kinds = kinds_of((*shared, rows, columns), seed=sum(seqlens))
    q = torch.randn(2, 4, seqlens[0], 8)
    k, v = torch.randn(2, 2, 2, seqlens[1], 8)
    mask = mask_of(kinds, where, block, seqlens, odd)
    inputs = [x.to(where).requires_grad_() for x in (q, k, v)]
    out = flex_attention(*inputs, None, mask, enable_gqa=True)
    pairs = visible(kinds, block, seqlens, odd)
    grad = torch.randn(out.shape) / 4

    def plain(dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        ref, _ = plain_attention(*leaves, None, lambda *_: pairs)
        return ref.detach(), torch.autograd.grad(ref, leaves, grad.to(dtype))

    (ref, ref_gradients), (low, low_gradients) = plain(torch.float64), plain(torch.float32)
    check(out, ref, low)
    gradients = torch.autograd.grad(out, inputs, grad.to(where))
    for got, expected, lowp in zip(gradients, ref_gradients, low_gradients, strict=True):
        check(got, expected, lowp)


@pytest.mark.parametrize("seqlen_q", [1, 16])
def test_decode_skips_and_opens_blocks(device, kernels, seqlen_q):
    kinds = torch.tensor([[OPEN, HIDDEN, MIXED, OPEN, HIDDEN], [HIDDEN, MIXED, OPEN, MIXED, MIXED]])
    kinds = kinds.reshape(1, 2, 1, 5)
    q = torch.randn(2, 4, seqlen_q, 8)
    k, v = torch.randn(2, 2, 2, 150, 8)
    kinds = kinds.repeat_interleave(2, 1)
    mask = mask_of(kinds, device, (32, 32), (seqlen_q, 150), odd)
    kernels()
    out = flex_attention(*(x.to(device) for x in (q, k, v)), None, mask, enable_gqa=True)
    assert "flash_decode" in kernels()
    pairs = visible(kinds, (32, 32), (seqlen_q, 150), odd)
    check(out, plain_attention(*(x.double() for x in (q, k, v)), None, lambda *_: pairs)[0],
          plain_attention(q, k, v, None, lambda *_: pairs)[0])


def test_the_table_of_a_causal_mask():
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 200, 140, device="cpu",
                             BLOCK_SIZE=(64, 64))
    table = block_classes(mask, 200, 140)[0, 0]
    expected = torch.tensor([[MIXED, HIDDEN, HIDDEN], [OPEN, MIXED, HIDDEN], [OPEN, OPEN, MIXED],
                             [MIXED, MIXED, MIXED]])
    # PyTorch takes blocks that the end cuts off for partial.
    assert torch.equal(table, expected.repeat_interleave(2, 0).repeat_interleave(2, 1)[:7, :5])


def test_work_is_that_of_the_visible_blocks(device, simulator):
    """A block-diagonal mask of 4 documents: a quarter of the products, forward and backward."""
    def products(mask):
        inputs = [torch.randn(1, 1, 256, 8, device=device, requires_grad=True) for _ in range(3)]
        simulator.reset_counters()
        flex_attention(*inputs, None, mask).sum().backward()
        return {row["kernel"].split("_d8")[0]: row["matrix_products"]
                for row in simulator.counters() if row.get("matrix_products")}

    def document(b, h, q, k):
        return q // 64 == k // 64

    if simulator is None:
        pytest.skip("only the simulated device counts")
    mask = create_block_mask(document, None, None, 256, 256, device="mps", BLOCK_SIZE=64)
    skipping, everything = products(mask), products(None)
    assert len(skipping) == 3
    for kernel, count in skipping.items():
        assert count * 4 == everything[kernel], kernel


def test_a_mask_for_another_length_after_adjusting(device):
    q = torch.randn(1, 1, 70, 8, device=device)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 200, 200, device="mps",
                             BLOCK_SIZE=32)
    own = create_block_mask(lambda b, h, q, k: q >= k, None, None, 70, 70, device="mps",
                            BLOCK_SIZE=32)
    check_same_bits(flex_attention(q, q, q, None, mask._adjust(70, 70)),
                    flex_attention(q, q, q, None, own))


def test_one_key_for_every_batch_entry(device):
    """As PyTorch: key and value of batch 1, where the block mask has query's batch."""
    q, kv = torch.randn(3, 2, 40, 8), torch.randn(1, 2, 50, 8)
    mask = create_block_mask(lambda b, h, q, k: k < 10 + 15 * b, 3, None, 40, 50, device="mps",
                             BLOCK_SIZE=32)
    inputs = [x.to(device).requires_grad_() for x in (q, kv, kv)]
    out = flex_attention(*inputs, None, mask)
    leaves = [x.double().requires_grad_() for x in (q, kv, kv)]
    ref, _ = plain_attention(*leaves, None, lambda b, h, q, k: k < 10 + 15 * b)
    check(out, ref)
    for got, expected in zip(torch.autograd.grad(out.sum(), inputs),
                             torch.autograd.grad(ref.sum(), leaves), strict=True):
        check(got / 8, expected / 8)


@pytest.mark.parametrize("where", ["mps", "cpu"])
def test_a_mask_that_inference_mode_made(device, where):
    """Its tensors count no versions: it is read anew in every call."""
    q = torch.randn(1, 1, 70, 8, device=where)
    with torch.inference_mode():
        mask = create_block_mask(odd, None, None, 70, 70, device=where, BLOCK_SIZE=32)
        out = flex_attention(q, q, q, None, mask)
        check(out, plain_attention(*[q.cpu().double()] * 3, None, odd)[0])
        mask.kv_num_blocks.clamp_(max=1)
        assert not torch.equal(flex_attention(q, q, q, None, mask), out)
