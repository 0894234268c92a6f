"""The inputs that tests and benchmarks share: one dataclass, named lists of it, and their work."""

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from torch_flash_mps.reference import visible_pairs

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DTYPE_NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}

# Masks by name: (the dtype, None = that of query; the dimensions that are not broadcast). Any other
# is named by the first of its dtype and its dimensions: "float.bk".
MASKS = {
    "bool": (torch.bool, "bhqk"),
    "bool_rows": (torch.bool, "qk"),
    "bool_keys": (torch.bool, "bk"),
    "bool_heads": (torch.bool, "hqk"),
    "float": (None, "bhqk"),
    "float_rows": (None, "qk"),
    "float_heads": (None, "h"),
    "float32": (torch.float32, "bhqk"),
}

# How an operand lies in its buffer: rows of other heads between its own ("bshd"), a last dimension
# that is not dense ("strided"), a slice with an odd margin on every side ("sliced"), or one with a
# margin that lets rows start on 16 bytes ("aligned").
LAYOUTS = ("sliced", "bshd", "strided", "aligned")

RNG_STATE = torch.tensor([123456789, -987654321], dtype=torch.int32)   # of dropout


@dataclass(frozen=True)
class Case:
    """One attention problem. Sizes as in the docs: query [B, Hq, Sq, D], value [B, Hkv, Sk, Dv]."""

    batch: int = 1
    num_heads_q: int = 1
    num_heads_kv: int = 1
    seqlen_q: int = 16
    seqlen_k: int = 16
    head_dim: int = 64
    head_dim_v: int | None = None
    dtype: torch.dtype = torch.float32
    causal: bool = False
    mask: str | None = None
    layout: str = "sliced"
    scale: float | None = None
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: str | None = None   # "heads" or "batch": slopes [Hq] or [B, Hq]
    sinks: bool = False
    dropout_p: float = 0.0   # with the random numbers of RNG_STATE
    bottom_right: bool = False   # causal and windows: the last query stands at the last key

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def id(self) -> str:
        parts = [
            f"b{self.batch}-hq{self.num_heads_q}-kv{self.num_heads_kv}",
            f"sq{self.seqlen_q}-sk{self.seqlen_k}-d{self.head_dim}",
        ]
        if self.value_dim != self.head_dim:
            parts.append(f"dv{self.value_dim}")
        parts.append(DTYPE_NAMES[self.dtype])
        parts += ["causal"] * self.causal
        parts += [name for name in (self.mask, self.layout) if name not in (None, "sliced")]
        if self.scale is not None:
            parts.append(f"scale{self.scale:g}")
        if self.window != (-1, -1):
            parts.append("window{}.{}".format(*self.window))
        if self.softcap:
            parts.append(f"cap{self.softcap:g}")
        parts += [f"alibi.{self.alibi}"] * (self.alibi is not None)
        parts += ["sinks"] * self.sinks
        if self.dropout_p:
            parts.append(f"drop{self.dropout_p:g}")
        parts += ["bottom_right"] * self.bottom_right
        return "-".join(parts)


@dataclass(frozen=True)
class Inputs:
    """The operands of one case and its options, in the words of the op."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    is_causal: bool
    scale: float | None
    score_options: dict = field(default_factory=dict)

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def options(self) -> dict:
        plain = {"attn_mask": self.attn_mask, "is_causal": self.is_causal, "scale": self.scale}
        return plain | self.score_options


def flops(case: Case) -> int:
    """Multiplications and additions of both matrix products over the visible pairs."""
    left, right = case.window
    pairs = int(visible_pairs(case.seqlen_q, case.seqlen_k, is_causal=case.causal,
                              window_left=left, window_right=right).sum())
    return 2 * case.batch * case.num_heads_q * pairs * (case.head_dim + case.value_dim)


def poisoned(x: Tensor, device: torch.device | str, layout: str = "sliced") -> Tensor:
    """The same values on `device`, as a view of a larger buffer whose other bytes are poison.

    Poison is NaN for floating-point tensors and bytes of 0xFF otherwise. The margins are odd, so
    that neither rows nor the first element are aligned to more than one element; but for "aligned".
    """
    if layout == "bshd" and x.dim() == 4:
        return poisoned(x.transpose(1, 2), device).transpose(1, 2)
    step = 2 if layout == "strided" else 1
    before, after = (16, 16) if layout == "aligned" else (1, 2)
    shape = [size + 3 for size in x.shape[:-1]] + [before + x.shape[-1] * step + after]
    inner = [slice(1, 1 + size) for size in x.shape[:-1]]
    inner.append(slice(before, before + x.shape[-1] * step, step))
    if x.is_floating_point():
        buffer = torch.full(shape, math.nan, dtype=x.dtype)
    else:
        buffer = torch.full(
            (*shape[:-1], shape[-1] * x.element_size()), 0xFF, dtype=torch.uint8
        ).view(x.dtype)
    buffer[tuple(inner)] = x
    return buffer.to(device)[tuple(inner)]


def make_inputs(case: Case, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
    """Random operands of a case, each a view of a poisoned buffer (see `poisoned`)."""
    generator = torch.Generator().manual_seed(seed)

    def operand(heads: int, seqlen: int, dim: int) -> Tensor:
        x = torch.randn(case.batch, heads, seqlen, dim, generator=generator)
        return poisoned(x.to(case.dtype), device, case.layout)

    return Inputs(
        query=operand(case.num_heads_q, case.seqlen_q, case.head_dim),
        key=operand(case.num_heads_kv, case.seqlen_k, case.head_dim),
        value=operand(case.num_heads_kv, case.seqlen_k, case.value_dim),
        attn_mask=None if case.mask is None else _mask(case, device, generator),
        is_causal=case.causal,
        scale=case.scale,
        score_options=score_options(case, device),
    )


def score_options(case: Case, device: torch.device | str = "cpu") -> dict:
    """The window, score modifiers and dropout of a case in the words of the op."""
    generator = torch.Generator().manual_seed(1)
    options: dict = {}
    if case.window != (-1, -1):
        options["window_left"], options["window_right"] = case.window
    if case.softcap:
        options["softcap"] = case.softcap
    if case.alibi is not None:
        shape = (case.batch, case.num_heads_q)[case.alibi == "heads":]
        slopes = torch.rand(shape, generator=generator) * 0.5
        options["alibi_slopes"] = poisoned(slopes, device)
    if case.sinks:
        sinks = torch.randn(case.num_heads_q, generator=generator) * 2
        options["sinks"] = poisoned(sinks.to(case.dtype), device)
    if case.dropout_p:
        options["dropout_p"], options["rng_state"] = case.dropout_p, RNG_STATE
    if case.bottom_right:
        options["is_bottom_right"] = True
    return options


def _mask(case: Case, device: torch.device | str, generator: torch.Generator) -> Tensor:
    kind, dot, dims = case.mask.partition(".")
    dtype, dims = (MASKS[kind][0], dims) if dot else MASKS[kind]
    sizes = {
        "b": case.batch,
        "h": case.num_heads_q,
        "q": case.seqlen_q,
        "k": case.seqlen_k,
    }
    shape = [sizes[dim] if dim in dims else 1 for dim in "bhqk"]
    if dtype == torch.bool:
        return poisoned(torch.rand(shape, generator=generator) < 0.7, device, case.layout)
    mask = torch.randn(shape, generator=generator)
    if "k" in dims:
        mask[torch.rand(shape, generator=generator) < 0.2] = -math.inf
    return poisoned(mask.to(dtype or case.dtype), device, case.layout)


def ramp(
    seqlen_q: int, seqlen_k: int, head_dim: int = 8, *, heads: int = 1, dtype=torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """RAMP probe on the CPU: each output is the mean of the key indexes that its row sees."""
    query = torch.zeros(1, heads, seqlen_q, head_dim, dtype=dtype)
    key = torch.ones(1, heads, seqlen_k, head_dim, dtype=dtype)
    value = torch.arange(seqlen_k, dtype=torch.float32)[:, None].expand(seqlen_k, head_dim)
    return query, key, value.expand(1, heads, -1, -1).to(dtype).contiguous()


def eye(seqlen: int, head_dim: int, dtype=torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """EYE probe on the CPU: one-hot queries and keys, value = identity, so out = probabilities."""
    one_hot = torch.eye(seqlen, head_dim).mul(64.0).to(dtype)[None, None]
    return one_hot, one_hot, torch.eye(seqlen, head_dim, dtype=dtype)[None, None]


SMOKE = [
    Case(num_heads_q=2, num_heads_kv=2, seqlen_q=33, seqlen_k=45, dtype=dtype, causal=causal)
    for dtype in DTYPES
    for causal in (False, True)
]

GQA = [
    Case(batch=batch, num_heads_q=2 * ratio, num_heads_kv=2, seqlen_q=5, seqlen_k=19, mask=mask)
    for batch, ratio, mask in (
        (1, 1, None),
        (3, 2, "bool_heads"),
        (1, 3, "bool"),
        (3, 4, "float_heads"),
        (1, 5, None),
        (1, 7, "float32"),
        (3, 8, "bool_heads"),
        (1, 14, None),
        (1, 16, "bool_heads"),
        (1, 32, None),
    )
]

MASKED = [
    replace(case, mask=mask, seqlen_q=21, seqlen_k=70, causal=causal)
    for case in (
        Case(batch=2, num_heads_q=4, num_heads_kv=2),
        Case(batch=2, num_heads_q=4, num_heads_kv=2, dtype=torch.float16),
    )
    for mask in MASKS
    for causal in (False, True)
]

LAYOUT = [
    Case(2, 4, 2, 19, 37, dtype=dtype, layout=layout, mask=mask)
    for dtype in DTYPES
    for layout in LAYOUTS
    for mask in (None, "bool", "float")
]

# Windows, softcap, ALiBi and sinks: alone, with causal and masks, all of them together.
SCORED = [
    replace(case, dtype=dtype, **options)
    for dtype in DTYPES
    for case in (Case(2, 4, 2, 37, 70, 40), Case(2, 4, 2, 70, 37, 24, 40))
    for options in (
        {"window": (5, 9)},
        {"window": (1, -1), "causal": True, "mask": "bool"},
        {"softcap": 1.5, "mask": "float_heads"},
        {"alibi": "batch", "causal": True},
        {"sinks": True, "mask": "bool_rows"},
        {"window": (20, 3), "softcap": 2.0, "alibi": "heads", "sinks": True, "mask": "float"},
    )
]

# One layer's attention of the example models, prefill and one decode step.
MODELS = {
    "smollm2-135m-prefill": Case(1, 9, 3, 128, 128, 64, causal=True),
    "smollm2-135m-decode": Case(1, 9, 3, 1, 128, 64),
    "minilm-l6": Case(2, 12, 12, 48, 48, 32, mask="bool_keys"),
}
