"""The support table of README.md, made by trying each feature on the device at hand.

    python tests/support_table.py            # prints it
    python tests/support_table.py --write    # puts it into README.md
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from generated_table import GeneratedTable, markdown
from torch.nn.attention.flex_attention import create_block_mask

import torch_flash_mps

README = Path(__file__).resolve().parent.parent / "README.md"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="mps")


def _call(
    dtype: torch.dtype, *, heads: int = 2, head_dim: int = 8, head_dim_v: int = 8,
    seqlens: tuple[int, int] = (3, 5), leading: tuple[int, ...] = (1,), **options,
) -> None:
    seqlen_q, seqlen_k = seqlens
    query = _zeros(dtype, *leading, heads, seqlen_q, head_dim)
    key = _zeros(dtype, *leading, 2, seqlen_k, head_dim)
    value = _zeros(dtype, *leading, 2, seqlen_k, head_dim_v)
    torch_flash_mps.attention(query, key, value, **options)


def _backward(
    dtype: torch.dtype, mask: torch.Tensor | None = None, of_lse: bool = False, head_dim: int = 8,
) -> None:
    query = _zeros(dtype, 1, 1, 3, head_dim).requires_grad_()
    out, lse = torch_flash_mps.attention(query, query, query, attn_mask=mask, return_lse=True)
    (lse if of_lse else out).sum().backward()
    assert query.grad is not None and (mask is None or mask.grad is not None)


def _backward_twice(dtype: torch.dtype) -> None:
    query = _zeros(dtype, 1, 1, 3, 8).requires_grad_()
    out = torch_flash_mps.attention(query, query, query)
    (gradient,) = torch.autograd.grad(out.sum(), query, create_graph=True)
    gradient.sum().backward()


def _forward_mode(dtype: torch.dtype) -> None:
    query = _zeros(dtype, 1, 1, 3, 8)
    torch.func.jvp(lambda q: torch_flash_mps.attention(q, query, query), (query,), (query,))


def _backward_of_sinks(dtype: torch.dtype) -> None:
    query, sinks = _zeros(dtype, 1, 2, 3, 8).requires_grad_(), _zeros(dtype, 2).requires_grad_()
    torch_flash_mps.attention(
        query, query, query, window_left=1, softcap=30.0, alibi_slopes=_zeros(torch.float32, 2),
        sinks=sinks,
    ).sum().backward()
    assert query.grad is not None and sinks.grad is not None


def _cached(dtype: torch.dtype, cache_dtype: torch.dtype | None = None, **options) -> None:
    pages = _zeros(cache_dtype or dtype, 2, 2, 16, 8)
    scale = None if cache_dtype is None else _zeros(torch.float32, 2, 2, 16)
    torch.ops.flash_mps.attention_with_kvcache(
        _zeros(dtype, 1, 4, 3, 8), pages, pages, k_scale=scale, v_scale=scale,
        seqlens_k=_zeros(torch.int32, 1) + 20, block_table=_zeros(torch.int32, 1, 2), **options,
    )


def _flex(dtype: torch.dtype, seqlen_q: int) -> None:
    query, table = _zeros(dtype, 1, 2, seqlen_q, 8), _zeros(torch.float32, 2, 4)
    if seqlen_q > 1:
        query.requires_grad_()
        table.requires_grad_()
    key = _zeros(dtype, 1, 2, 20, 8)
    mask = create_block_mask(lambda b, h, q, k: q - k < 5, None, None, seqlen_q, 20, device="mps",
                             BLOCK_SIZE=32)
    out = torch_flash_mps.flex_attention(
        query, key, key, lambda score, b, h, q, k: score * 2 + table[h, k % 4], mask)
    if seqlen_q > 1:
        out.sum().backward()
        assert query.grad is not None and table.grad is not None


def _transposed(dtype: torch.dtype) -> None:
    x = _zeros(dtype, 1, 3, 2, 8).transpose(1, 2)
    torch_flash_mps.attention(x, x, x)


def _packed(dtype: torch.dtype, **options) -> None:
    query, key = _zeros(dtype, 9, 4, 8).requires_grad_(), _zeros(dtype, 12, 2, 8).requires_grad_()
    out, lse = torch_flash_mps.attention_varlen(
        query, key, key, torch.tensor([0, 2, 2, 7]).to("mps"), torch.tensor([0, 5, 6, 12]), 5, 6,
        return_lse=True, **options)
    (out.sum() + lse[:, :7].sum()).backward()
    assert query.grad is not None and key.grad is not None


def _jagged(dtype: torch.dtype) -> None:
    rows = _zeros(dtype, 9, 2, 8).requires_grad_()
    offsets = torch.tensor([0, 2, 9]).to("mps")
    x = torch.nested.nested_tensor_from_jagged(rows, offsets).transpose(1, 2)
    with torch_flash_mps.sdpa_enabled():
        out = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    out.transpose(1, 2).values().sum().backward()
    assert rows.grad is not None


FEATURES: dict[str, Callable[[torch.dtype], None]] = {
    "forward, seqlen_q ≠ seqlen_k": lambda t: _call(t),
    "one query (decode)": lambda t: _call(t, seqlens=(1, 5)),
    "`head_dim` 1 … 576": lambda t: [
        _call(t, head_dim=d, head_dim_v=d, seqlens=(s, 20)) for d in (1, 576) for s in (3, 17)
    ],
    "`head_dim_v` ≠ `head_dim`": lambda t: _call(t, head_dim_v=16),
    "any strides and offsets": _transposed,
    "ranks 2, 3, 5": lambda t: [_call(t, leading=lead) for lead in ((), (2, 2))],
    "`is_causal` (top-left)": lambda t: _call(t, is_causal=True),
    "bool `attn_mask`": lambda t: _call(t, attn_mask=_zeros(torch.bool, 3, 5)),
    "float `attn_mask`, dtype of query": lambda t: _call(t, attn_mask=_zeros(t, 3, 5)),
    "float32 `attn_mask`": lambda t: _call(t, attn_mask=_zeros(torch.float32, 3, 5)),
    "mask and `is_causal` together": lambda t: _call(
        t, is_causal=True, attn_mask=_zeros(torch.bool, 3, 5)
    ),
    "grouped heads (`enable_gqa`)": lambda t: _call(t, heads=6, enable_gqa=True),
    "log-sum-exp (`return_lse`)": lambda t: _call(t, return_lse=True),
    "KV cache: lengths, pages": lambda t: _cached(t),
    "KV cache of int8 with scales": lambda t: _cached(t, torch.int8),
    "gradients of query, key, value": lambda t: [_backward(t, head_dim=d) for d in (8, 576)],
    "gradient of a float `attn_mask`": lambda t: _backward(t, _zeros(t, 3, 3).requires_grad_()),
    "gradients through the log-sum-exp": lambda t: _backward(t, of_lse=True),
    "`window_left`, `window_right`": lambda t: _call(t, window_left=1, window_right=1),
    "`softcap`": lambda t: _call(t, softcap=30.0),
    "`alibi_slopes`": lambda t: _call(t, alibi_slopes=_zeros(torch.float32, 2)),
    "`sinks`": lambda t: _call(t, sinks=_zeros(torch.float32, 2)),
    "gradients with all of these, of `sinks` too": lambda t: _backward_of_sinks(t),
    "KV cache with all of these": lambda t: _cached(
        t, window_left=9, softcap=30.0, alibi_slopes=_zeros(torch.float32, 4), sinks=_zeros(t, 4)
    ),
    "packed sequences (`attention_varlen`), with gradients": lambda t: _packed(t),
    "packed sequences with windows, bottom-right, and all of these": lambda t: _packed(
        t, is_causal=True, is_bottom_right=True, window_left=2, softcap=30.0, dropout_p=0.1,
        alibi_slopes=_zeros(torch.float32, 3, 4), sinks=_zeros(t, 4)
    ),
    "jagged nested tensors through `enable_sdpa()`": lambda t: _jagged(t),
    "`flex_attention`, with gradients": lambda t: _flex(t, 20),
    "`flex_attention`, one query (decode)": lambda t: _flex(t, 1),
    "`dropout_p` > 0": lambda t: _call(t, dropout_p=0.1),
    "gradient of `alibi_slopes`": lambda t: _call(
        t, alibi_slopes=_zeros(torch.float32, 2).requires_grad_()
    ),
    "double backward": lambda t: _backward_twice(t),
    "forward-mode differentiation": lambda t: _forward_mode(t),
}


def _answer(feature: Callable[[torch.dtype], None], dtype: torch.dtype) -> str:
    try:
        feature(dtype)
        torch.mps.synchronize()
    except RuntimeError:
        return "no"
    return "yes"


def support_table() -> str:
    """The table as Markdown: one row for each feature, one column for each dtype."""
    header = ["", *(str(dtype).removeprefix("torch.") for dtype in DTYPES)]
    rows = [
        [name, *(_answer(feature, dtype) for dtype in DTYPES)]
        for name, feature in FEATURES.items()
    ]
    return markdown(header, *rows)


TABLE = GeneratedTable(README, "support table", support_table)

if __name__ == "__main__":
    if sys.platform != "darwin":
        import torch_flash_mps.simulator  # noqa: F401
    TABLE.main(__doc__.splitlines()[0])
