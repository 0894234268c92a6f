"""The flash_attn functions of packed sequences, and bert_padding's way to them and back."""

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from checks import check_exact, check_same_bits
from packed import Packed, make_packed

from torch_flash_mps.flash_attn import (
    bert_padding,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

LENGTHS = (7, 1, 0, 30)


def test_options_mean_what_they_mean_in_the_op(place):
    packed = Packed(LENGTHS, (9, 4, 3, 20), Case(4, 4, 2, head_dim=24), is_bottom_right=True)
    inputs = make_packed(packed, place)
    slopes = torch.rand(4, 4).to(place)
    out, lse, probabilities = flash_attn_varlen_func(
        *inputs.operands.values(), *inputs.cu_seqlens, *inputs.max_seqlens, causal=True,
        softmax_scale=0.3, window_size=(5, 0), softcap=2.0, alibi_slopes=slopes,
        return_attn_probs=True)
    assert probabilities.numel() == 0
    inputs.options.update(is_causal=True, scale=0.3, window_left=5, window_right=0, softcap=2.0,
                          alibi_slopes=slopes)
    for got, expected in zip((out, lse), inputs.attend(**inputs.operands), strict=True):
        check_same_bits(got, expected)


def test_packed_operands_are_the_three(place):
    qkv = torch.randn(38, 3, 2, 24).to(place)
    lengths = torch.tensor([0, 7, 8, 8, 38], dtype=torch.int32).to(place)
    expected = flash_attn_varlen_func(*qkv.unbind(1), lengths, lengths, 30, 30, causal=True)
    check_same_bits(flash_attn_varlen_qkvpacked_func(qkv, lengths, 30, causal=True), expected)
    check_same_bits(
        flash_attn_varlen_kvpacked_func(qkv[:, 0], qkv[:, 1:], lengths, lengths, 30, 30,
                                        causal=True), expected)


@pytest.mark.parametrize("left", [False, True], ids=["padded-right", "padded-left"])
def test_unpad_attend_pad_is_attention_of_each_alone(place, left):
    """As models that were written for flash_attn do it, with gradients."""
    x = torch.randn(4, 30, 2, 24).to(place).requires_grad_()
    mask = torch.arange(30) < torch.tensor(LENGTHS)[:, None]
    mask = (mask.flip(1) if left else mask).to(place)
    tokens, indices, cu_seqlens, max_seqlen, used = bert_padding.unpad_input(x, mask)
    assert cu_seqlens.tolist() == [0, 7, 8, 8, 38] and cu_seqlens.dtype == torch.int32
    assert max_seqlen == 30 and used.tolist() == list(LENGTHS) and used.dtype == torch.int32
    assert indices.dtype == torch.int64 and tokens.shape == (38, 2, 24)
    out = flash_attn_varlen_func(tokens, tokens, tokens, cu_seqlens, cu_seqlens, max_seqlen,
                                 max_seqlen, causal=True)
    padded = bert_padding.pad_input(out, indices, 4, 30)
    assert padded.shape == x.shape
    gradients = [torch.autograd.grad(padded.square().sum(), x)[0]]
    loss = 0.0
    for i, own in enumerate(mask.cpu()):
        check_exact(padded[i][~own.to(place)], 0.0)
        if own.any():
            alone = x[i][own.to(place)][None]
            expected = flash_attn_func(alone, alone, alone, causal=True)
            check_exact(padded[i][own.to(place)], expected[0], 1e-5)
            loss = loss + expected.square().sum()
    gradients.append(torch.autograd.grad(loss, x)[0])
    check_exact(*gradients, 1e-4)


def test_places_that_are_kept_but_unused():
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    unused = torch.tensor([[0, 0, 1, 0], [0, 1, 1, 0]])
    x = torch.arange(8.0).reshape(2, 4, 1)
    tokens, _, cu_seqlens, max_seqlen, used = bert_padding.unpad_input(x, mask, unused)
    assert tokens.flatten().tolist() == [0, 1, 2, 4, 5, 6]
    assert (cu_seqlens.tolist(), max_seqlen, used.tolist()) == ([0, 3, 6], 3, [2, 1])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_index_first_axis_and_its_inverse(dtype):
    x = torch.randn(5, 2, 3, requires_grad=True)
    indices = torch.tensor([4, 0, 2], dtype=dtype)
    rows = bert_padding.index_first_axis(x, indices)
    check_same_bits(rows, x[indices])
    back = bert_padding.index_put_first_axis(rows, indices, 5)
    check_exact(back, x * F.one_hot(indices.long(), 5).sum(0)[:, None, None])
    (gradient,) = torch.autograd.grad(back.sum(), x)
    assert gradient.sum(dim=(1, 2)).tolist() == [6, 0, 6, 0, 6]
