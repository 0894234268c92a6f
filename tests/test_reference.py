"""The oracle against closed forms, against torch's own attention, and against the numpy texts."""

import doctest
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from torch_flash_mps import reference
from torch_flash_mps.reference import attention_naive, attention_ref, attention_tiled


def _ramp(seqlen_k, heads=1):
    return torch.arange(float(seqlen_k)).reshape(1, 1, seqlen_k, 1).expand(1, heads, seqlen_k, 1)


def _means(seqlen_q, seqlen_k, **options):
    """Mean of the visible key indexes of each query row."""
    q, k = torch.zeros(1, 1, seqlen_q, 8), torch.ones(1, 1, seqlen_k, 8)
    out, lse = attention_ref(q, k, _ramp(seqlen_k), **options)
    return out.flatten().tolist(), lse.flatten().tolist()


def test_docstrings_are_true():
    assert doctest.testmod(reference).failed == 0


def test_causal_square():
    assert _means(8, 8, is_causal=True)[0] == pytest.approx([i / 2 for i in range(8)])


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "expected"),
    [
        (3, 8, ([0, 0.5, 1], [2.5, 3, 3.5])),
        (8, 3, ([0, 0.5, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0.5, 1])),
    ],
)
def test_causal_alignments(seqlen_q, seqlen_k, expected):
    top_left, _ = _means(seqlen_q, seqlen_k, is_causal=True)
    bottom_right, lse = _means(
        seqlen_q, seqlen_k, is_causal=True, causal_offset=seqlen_k - seqlen_q
    )
    assert top_left == pytest.approx(expected[0])
    assert bottom_right == pytest.approx(expected[1])
    empty = max(seqlen_q - seqlen_k, 0)
    assert lse[:empty] == [-math.inf] * empty
    assert all(map(math.isfinite, lse[empty:]))


def test_window_reaches_left_and_right_of_the_diagonal():
    assert _means(5, 9, causal_offset=2, window_left=1, window_right=2)[0] == pytest.approx(
        [2.5, 3.5, 4.5, 5.5, 6.5]
    )


def test_lse_is_a_natural_logarithm():
    assert _means(1, 8)[1] == pytest.approx([math.log(8)])


def test_softcap_anchor():
    q = torch.tensor([10.0, 0.0]).reshape(1, 1, 1, 2)
    k = torch.tensor([[10.0, 0.0], [0.0, 0.0]]).reshape(1, 1, 2, 2)
    v = torch.eye(2).reshape(1, 1, 2, 2)
    out, _ = attention_ref(q, k, v, scale=1.0, softcap=1.0)
    assert out.flatten().tolist() == pytest.approx([0.731059, 0.268941], abs=1e-6)
    hidden = torch.tensor([False, True])
    out, _ = attention_ref(q, k, v, scale=1.0, softcap=1.0, attn_mask=hidden)
    assert out.flatten().tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("sink", "expected"), [(0.0, 2.25), (math.log(5), 1.125), (-math.inf, 3.0)]
)
def test_sink_anchor(sink, expected):
    q, k, v = torch.zeros(1, 2, 1, 4), torch.zeros(1, 1, 3, 4), torch.full((1, 1, 3, 1), 3.0)
    out, lse = attention_ref(q, k, v, sinks=torch.full((2,), sink))
    assert out.flatten().tolist() == pytest.approx([expected] * 2)
    assert lse.flatten().tolist() == pytest.approx([math.log(3 + math.exp(sink))] * 2)


def test_sink_of_a_row_without_keys():
    q, k = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 3, 4)
    out, lse = attention_ref(
        q, k, k, sinks=torch.tensor([0.5]), attn_mask=torch.zeros(3, dtype=torch.bool)
    )
    assert out.flatten().tolist() == [0.0] * 4
    assert lse.item() == 0.5


def test_alibi_anchor():
    q, k = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 3, 4)
    out, _ = attention_ref(
        q, k, _ramp(3), alibi_slopes=torch.tensor([0.5]), causal_offset=2
    )
    assert out.item() == pytest.approx(1.320157, abs=1e-6)


def test_a_row_without_keys_is_zero_and_a_finite_mask_is_not_that():
    for nothing in (False, -math.inf):
        mask = torch.tensor([[nothing] * 4, [1] * 4]).to(
            torch.bool if nothing is False else torch.float32
        )
        means, lse = _means(2, 4, attn_mask=mask)
        assert means == [0.0, 1.5]
        assert lse[0] == -math.inf
    lowest = torch.full((2, 4), torch.finfo(torch.float32).min)
    assert _means(2, 4, attn_mask=lowest)[0] == [1.5, 1.5]


@pytest.mark.parametrize("operand", ["key", "value"])
def test_a_key_that_a_row_does_not_see_gives_it_nothing(operand):
    k, v = torch.ones(1, 1, 4, 8), _ramp(4).clone()
    (k if operand == "key" else v)[:, :, 3] = math.nan
    out, _ = attention_ref(torch.zeros(1, 1, 4, 8), k, v, is_causal=True)
    assert out.flatten()[:3].tolist() == [0, 0.5, 1]
    assert math.isnan(out.flatten()[3])


def test_nan_in_a_query_stays_in_its_row():
    q = torch.zeros(1, 1, 3, 8)
    q[0, 0, 1, 0] = math.nan
    out, _ = attention_ref(q, torch.ones(1, 1, 4, 8), _ramp(4))
    assert torch.isnan(out).flatten().tolist() == [False, True, False]


def test_empty_sizes():
    q = torch.randn(1, 2, 3, 8)
    out, lse = attention_ref(q, torch.randn(1, 2, 0, 8), torch.randn(1, 2, 0, 5))
    assert out.shape == (1, 2, 3, 5) and not out.any()
    assert (lse == -math.inf).all()
    out, _ = attention_ref(q[..., :0], torch.randn(1, 2, 4, 0), torch.ones(1, 2, 4, 5))
    assert out.shape == (1, 2, 3, 5) and (out == 1).all()
    for shape in ((0, 2, 3, 8), (1, 0, 3, 8), (1, 2, 0, 8)):
        empty = torch.randn(shape)
        assert attention_ref(empty, empty, empty)[0].shape == shape


@pytest.mark.parametrize("rank", [2, 3, 4, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_equals_torch(rank, masked):
    leading = (2, 3, 4)[: rank - 2]
    generator = torch.Generator().manual_seed(rank)
    q, k, v = (
        torch.randn(*leading, s, d, generator=generator, dtype=torch.float64)
        for s, d in ((5, 16), (7, 16), (7, 12))
    )
    mask = torch.rand(5, 7, generator=generator) < 0.6 if masked else None
    out, _ = attention_ref(q, k, v, attn_mask=mask, is_causal=not masked, scale=0.3)
    expected = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=not masked, scale=0.3
    )
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def test_grouped_heads_equal_torch():
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(2, 6, 5, 8, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(2, 2, 7, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    out, _ = attention_ref(q, k, v)
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (64, 64), (65, 127), (200, 33)])
@pytest.mark.parametrize(("block_q", "block_k"), [(64, 64), (16, 48), (1, 1)])
def test_tiled_equals_naive(seqlen_q, seqlen_k, block_q, block_k):
    rng = np.random.default_rng(0)
    Q = rng.standard_normal((seqlen_q, 24)) * 3
    K, V = rng.standard_normal((seqlen_k, 24)) * 3, rng.standard_normal((seqlen_k, 10))
    naive = attention_naive(Q, K, V)
    np.testing.assert_allclose(attention_tiled(Q, K, V, block_q, block_k), naive, 0, 1e-12)
    out, _ = attention_ref(*(torch.from_numpy(x) for x in (Q, K, V)))
    np.testing.assert_allclose(out.numpy(), naive, 0, 1e-12)
