"""The one oracle of tests, benchmarks and users: attention in plain torch and in plain numpy.

`attention_ref` means exactly what `torch.ops.flash_mps.attention` means, option by option, and
materialises everything that the kernel never does. The two numpy functions show, on one head,
why streaming the keys changes nothing: the online softmax of Milakov & Gimelshein (2018, "Online
normalizer calculation for softmax"), tiled as in FlashAttention (Dao et al. 2022).
"""

import math

import numpy as np
import torch
from torch import Tensor

__all__ = ["attention_naive", "attention_ref", "attention_tiled", "dropout_factors",
           "visible_pairs"]


def visible_pairs(
    seqlen_q: int,
    seqlen_k: int,
    *,
    is_causal: bool = False,
    causal_offset: int = 0,
    window_left: int = -1,
    window_right: int = -1,
) -> Tensor:
    """Which keys the positions alone let each query see.

    Query i stands at key position i + causal_offset: 0 is PyTorch's top-left alignment,
    seqlen_k - seqlen_q the bottom-right one of flash_attn. A window of -1 is unlimited.

    Returns:
        bool `[seqlen_q, seqlen_k]`, True = visible.

    >>> visible_pairs(2, 4, is_causal=True, causal_offset=2).int()
    tensor([[1, 1, 1, 0],
            [1, 1, 1, 1]], dtype=torch.int32)
    """
    distance = torch.arange(seqlen_k) - (torch.arange(seqlen_q)[:, None] + causal_offset)
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if is_causal:
        visible &= distance <= 0
    if window_left >= 0:
        visible &= distance >= -window_left
    if window_right >= 0:
        visible &= distance <= window_right
    return visible


def dropout_factors(
    rng_state: Tensor, batch: int, num_heads_q: int, seqlen_q: int, seqlen_k: int, dropout_p: float
) -> Tensor:
    """What dropout multiplies each pair by: Philox 4x32-10 (Salmon et al. 2011), in numpy.

    The key is the two words of `rng_state` (int32 `[2]`), the counter (j // 4, i, head of batch
    entry, 0), and word j % 4 decides: below dropout_p * 2^32 the pair is dropped.

    Returns:
        float64 `[batch, num_heads_q, seqlen_q, seqlen_k]`, 0 or 1 / (1 - dropout_p).
    """
    low_half = np.uint64(0xFFFFFFFF)
    key = [np.uint64(word) for word in rng_state.cpu().numpy().astype(np.uint32)]
    heads, rows, groups = batch * num_heads_q, seqlen_q, -(-seqlen_k // 4)
    c2, c1, c0 = np.meshgrid(*(np.arange(n, dtype=np.uint64) for n in (heads, rows, groups)),
                             indexing="ij")
    c3 = np.zeros_like(c0)
    for _ in range(10):
        even, odd = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = ((odd >> np.uint64(32)) ^ c1 ^ key[0], odd & low_half,
                          (even >> np.uint64(32)) ^ c3 ^ key[1], even & low_half)
        key = [(key[0] + np.uint64(0x9E3779B9)) & low_half,
               (key[1] + np.uint64(0xBB67AE85)) & low_half]
    words = np.stack([c0, c1, c2, c3], -1).reshape(batch, num_heads_q, seqlen_q, 4 * groups)
    threshold = min(round(dropout_p * 2**32), 2**32 - 1)
    kept = torch.from_numpy(words[..., :seqlen_k] >= np.uint64(threshold))
    return kept.double() * (1 / (1 - dropout_p) if dropout_p < 1 else 0.0)


def attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    causal_offset: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    window_left: int = -1,
    window_right: int = -1,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp, computed in `dtype` on the CPU; differentiable.

    Args:
        q: `[..., num_heads_q, seqlen_q, head_dim]`; other leading dimensions broadcast.
        k: `[..., num_heads_kv, seqlen_k, head_dim]`; query head h reads head
            h // (num_heads_q / num_heads_kv).
        v: `[..., num_heads_kv, seqlen_k, head_dim_v]`.
        attn_mask: bool (True = visible) or float (added to the scores; -inf = not visible),
            broadcastable to `[..., num_heads_q, seqlen_q, seqlen_k]`.
        is_causal: hide keys with j > i + causal_offset; together with a mask, the intersection.
        scale: factor on q·k; None = 1 / sqrt(head_dim).
        softcap: scores become softcap * tanh(scores / softcap); 0 = off.
        window_left, window_right: see `visible_pairs`.
        alibi_slopes: `[num_heads_q]` or `[batch, num_heads_q]`; adds -slope * abs(distance).
        sinks: `[num_heads_q]`; exp(sink) joins the softmax denominator only.
        dropout_p, rng_state: see `dropout_factors`; for rank 4. lse knows nothing of it.

    Returns:
        out `[..., num_heads_q, seqlen_q, head_dim_v]` and lse `[..., num_heads_q, seqlen_q]`, the
        natural log of the sum of exp(final scores), sinks included. A row that sees no key has
        out 0 and lse -inf (the sink, where there is one). A key contributes, NaN or not, to the
        rows that see it and to no other.

    >>> ramp = torch.arange(4.0).reshape(1, 1, 4, 1)
    >>> out, lse = attention_ref(torch.zeros(1, 1, 4, 8), torch.ones(1, 1, 4, 8), ramp,
    ...                          is_causal=True)
    >>> out.flatten()
    tensor([0.0000, 0.5000, 1.0000, 1.5000], dtype=torch.float64)
    """
    q, k, v = (x.cpu().to(dtype) for x in (q, k, v))
    k, v = _repeat_heads(k, q), _repeat_heads(v, q)
    seqlen_q, head_dim, seqlen_k = q.shape[-2], q.shape[-1], k.shape[-2]
    if scale is None:
        scale = 1 / math.sqrt(head_dim) if head_dim else 1.0

    scores = (q @ k.transpose(-1, -2)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        distance = torch.arange(seqlen_k) - (torch.arange(seqlen_q)[:, None] + causal_offset)
        scores = scores - _per_head(alibi_slopes, dtype) * distance.abs()

    visible = visible_pairs(
        seqlen_q,
        seqlen_k,
        is_causal=is_causal,
        causal_offset=causal_offset,
        window_left=window_left,
        window_right=window_right,
    )
    if attn_mask is not None:
        mask = attn_mask.cpu()
        if mask.dtype == torch.bool:
            visible = visible & mask
        else:
            visible = visible & (mask != -math.inf)
            scores = scores + mask.to(dtype)
    visible = visible.expand(scores.shape)
    scores = scores.masked_fill(~visible, -math.inf)

    probabilities, lse = _softmax(scores, sinks)
    if dropout_p and rng_state is not None:
        batch, heads = probabilities.shape[:2]
        factors = dropout_factors(rng_state, batch, heads, seqlen_q, seqlen_k, dropout_p)
        probabilities = probabilities * factors.to(dtype)
    return _weighted_sum(probabilities, v, visible), lse


def _softmax(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Probabilities and lse, with a sink of each head in the denominator."""
    # The maximum is subtracted only where there is one: -inf - -inf is NaN. It changes no result
    # and needs no gradient.
    row_max = scores.detach().amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full(
        (*scores.shape[:-1], 1), -math.inf
    )
    if sinks is not None:
        row_max = torch.maximum(row_max, _per_head(sinks.detach(), scores.dtype))
    row_max = row_max.masked_fill(row_max == -math.inf, 0.0)
    weights = torch.exp(scores - row_max)
    row_sum = weights.sum(-1, keepdim=True)
    if sinks is not None:
        row_sum = row_sum + torch.exp(_per_head(sinks, scores.dtype) - row_max)
    sees_none = row_sum == 0
    row_sum = row_sum.masked_fill(sees_none, 1.0)
    lse = (row_max + torch.log(row_sum)).masked_fill(sees_none, -math.inf).squeeze(-1)
    return weights / row_sum, lse


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """Gives a key or value one head for each query head."""
    if q.dim() < 3 or x.dim() < 3 or x.shape[-3] in (0, q.shape[-3]):
        return x
    return x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3)


def _per_head(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`[num_heads_q]` or `[batch, num_heads_q]`, ready to broadcast over the scores."""
    return x.cpu().to(dtype)[..., None, None]


def _weighted_sum(probabilities: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """probabilities @ v in which an unseen NaN or Inf of v counts for nothing (0 * NaN is NaN)."""
    finite = torch.isfinite(v)
    out = probabilities @ v.masked_fill(~finite, 0.0)
    if not finite.all():
        seen = visible.unsqueeze(-1) & ~finite.unsqueeze(-3)
        terms = probabilities.unsqueeze(-1) * v.unsqueeze(-3)
        out = out + terms.masked_fill(~seen, 0.0).sum(-2)
    return out


def attention_naive(Q: np.ndarray, K: np.ndarray, V: np.ndarray) -> np.ndarray:
    """Attention of one head as the formula reads: the whole score matrix, then softmax, then V.

    Args:
        Q: `[seqlen_q, head_dim]`.
        K: `[seqlen_k, head_dim]`.
        V: `[seqlen_k, head_dim_v]`.

    Returns:
        `[seqlen_q, head_dim_v]`.
    """
    S = Q @ K.T / math.sqrt(Q.shape[1])
    P = np.exp(S - S.max(axis=1, keepdims=True))
    return (P / P.sum(axis=1, keepdims=True)) @ V


def attention_tiled(
    Q: np.ndarray, K: np.ndarray, V: np.ndarray, block_q: int = 64, block_k: int = 64
) -> np.ndarray:
    """`attention_naive` without the score matrix: never more than block_q x block_k scores exist.

    Keys arrive block by block. Each row keeps the maximum m and the sum l of what it has seen;
    when a block raises the maximum, everything summed so far shrinks by exp(m_old - m_new), and
    the result stays exact (Milakov & Gimelshein 2018; Dao et al. 2022, algorithm 1).

    Args:
        Q, K, V: as for `attention_naive`.
        block_q: query rows held at a time.
        block_k: keys streamed at a time.

    Returns:
        `[seqlen_q, head_dim_v]`.
    """
    softmax_scale = 1 / math.sqrt(Q.shape[1])
    out = np.empty((Q.shape[0], V.shape[1]), dtype=np.result_type(Q, K, V))
    for q_begin in range(0, Q.shape[0], block_q):
        q_block = slice(q_begin, q_begin + block_q)
        rows = Q[q_block].shape[0]
        m = np.full((rows, 1), -np.inf)
        l = np.zeros((rows, 1))  # noqa: E741, the paper's letter
        O = np.zeros((rows, V.shape[1]))  # noqa: E741, the paper's letter
        for k_begin in range(0, K.shape[0], block_k):
            k_block = slice(k_begin, k_begin + block_k)
            S = Q[q_block] @ K[k_block].T * softmax_scale
            m_new = np.maximum(m, S.max(axis=1, keepdims=True))
            P = np.exp(S - m_new)
            rescale = np.exp(m - m_new)
            l = l * rescale + P.sum(axis=1, keepdims=True)  # noqa: E741
            O = O * rescale + P @ V[k_block]  # noqa: E741
            m = m_new
        out[q_block] = O / l
    return out
