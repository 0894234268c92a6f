"""The score_mods and mask_mods that people write, as cases, and the same in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from cases import DTYPE_NAMES, poisoned
from checks import check, check_exact
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import torch_flash_mps

Functions = tuple[Callable | None, Callable | None]   # score_mod, mask_mod


@dataclass(frozen=True)
class FlexCase:
    """Sizes, tensors that the functions capture (by name), and the functions of these."""

    name: str
    functions: Callable[[dict[str, Tensor]], Functions]
    captured: Callable[[torch.Generator], dict[str, Tensor]] = lambda generator: {}
    wanted: tuple[str, ...] = ()   # captured tensors with a gradient
    batch: int = 1
    num_heads_q: int = 2
    num_heads_kv: int = 2
    seqlen_q: int = 70
    seqlen_k: int = 70
    head_dim: int = 8
    dtype: torch.dtype = torch.float32
    scale: float | None = None
    block: int | tuple[int, int] = 32
    mask_batch: int | None = None   # B and H of create_block_mask
    mask_heads: int | None = None

    @property
    def id(self) -> str:
        return f"{self.name}-{DTYPE_NAMES[self.dtype]}"


@dataclass
class FlexCall:
    """The tensors of a case on a device."""

    case: FlexCase
    operands: dict[str, Tensor]   # query, key, value and the captured ones with a gradient
    others: dict[str, Tensor]
    block_mask: BlockMask | None = None
    grads: tuple[Tensor, Tensor] = field(default=())

    def run(self, **options):
        """Out and lse of the library."""
        score_mod, _ = self.case.functions(self.operands | self.others)
        return torch_flash_mps.flex_attention(
            *(self.operands[name] for name in ("query", "key", "value")), score_mod,
            self.block_mask, scale=self.case.scale, return_lse=True,
            enable_gqa=self.case.num_heads_q != self.case.num_heads_kv, **options)

    def reference(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Out, lse and gradients in plain torch on the CPU, in `dtype`."""
        leaves = {name: x.detach().cpu().to(dtype).requires_grad_()
                  for name, x in self.operands.items()}
        others = {name: x.cpu().to(dtype) if x.is_floating_point() else x.cpu()
                  for name, x in self.others.items()}
        functions = self.case.functions(leaves | others)
        out, lse = plain_attention(
            leaves["query"], leaves["key"], leaves["value"], *functions, self.case.scale)
        return out.detach(), lse.detach(), self.gradients(out, lse, leaves)

    def gradients(
        self, out: Tensor, lse: Tensor, leaves: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        grads = [grad.to(one.device, one.dtype) for grad, one in zip(self.grads, (out, lse),
                                                                     strict=True)]
        lse_grad = grads[1].masked_fill(lse.isinf(), 0.0)
        found = torch.autograd.grad((out, lse), list(leaves.values()), (grads[0], lse_grad))
        return dict(zip(leaves, found, strict=True))


def make_call(case: FlexCase, device: torch.device | str, seed: int = 0) -> FlexCall:
    """Random inputs, views of poisoned buffers."""
    generator = torch.Generator().manual_seed(seed)

    def random(heads: int, seqlen: int) -> Tensor:
        x = torch.randn(case.batch, heads, seqlen, case.head_dim, generator=generator)
        return poisoned(x.to(case.dtype), device).detach().requires_grad_()

    operands = {"query": random(case.num_heads_q, case.seqlen_q),
                "key": random(case.num_heads_kv, case.seqlen_k),
                "value": random(case.num_heads_kv, case.seqlen_k)}
    captured = {name: poisoned(x, device) if x.dim() else x.to(device)
                for name, x in case.captured(generator).items()}
    operands |= {name: captured.pop(name).detach().requires_grad_() for name in case.wanted}
    call = FlexCall(case, operands, captured)
    call.block_mask = block_mask_of(call, device)
    rows = (case.batch, case.num_heads_q, case.seqlen_q)
    # Small enough that the sums over all pairs, which captured scalars have, are of the size of 1.
    grads = [torch.randn(shape, generator=generator) / 4
             for shape in ((*rows, case.head_dim), rows)]
    call.grads = (grads[0].to(case.dtype), grads[1])
    return call


def block_mask_of(call: FlexCall, device: torch.device | str) -> BlockMask | None:
    case = call.case
    detached = {name: x.detach() for name, x in (call.operands | call.others).items()}
    _, mask_mod = case.functions(detached)
    if mask_mod is None:
        return None
    return create_block_mask(mask_mod, case.mask_batch, case.mask_heads, case.seqlen_q,
                             case.seqlen_k, device=str(device), BLOCK_SIZE=case.block)


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable | None,
    mask_mod: Callable | None, scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Matmul, the functions on whole tensors of indices, softmax, matmul."""
    group = query.size(1) // key.size(1)
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * (scale or 1 / math.sqrt(query.size(-1)))
    pair = [torch.arange(size).reshape([-1 if i == dim else 1 for i in range(4)])
            for dim, size in enumerate(scores.shape)]
    if score_mod is not None:
        scores = score_mod(scores, *pair)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(*pair), -math.inf)
    is_empty = (scores == -math.inf).all(-1, keepdim=True)
    lse = scores.masked_fill(is_empty, 0.0).logsumexp(-1).masked_fill(is_empty[..., 0], -math.inf)
    weights = torch.softmax(scores.masked_fill(is_empty, 0.0), -1).masked_fill(is_empty, 0.0)
    return weights.to(value.dtype) @ value, lse


def check_call(call: FlexCall, **options) -> None:
    """Judges out, lse and every gradient of a call."""
    case = call.case
    out, lse = call.run(**options)
    ref_out, ref_lse, ref_gradients = call.reference(torch.float64)
    low_out, _, low_gradients = call.reference(case.dtype)
    check(out, ref_out, low_out, case_id=case.id)
    check_exact(lse, ref_lse, 3e-5, case_id=f"{case.id} lse")
    for name, gradient in call.gradients(out, lse, call.operands).items():
        operand = call.operands[name]
        assert (gradient.shape, gradient.dtype) == (operand.shape, operand.dtype), name
        check(gradient, ref_gradients[name], low_gradients[name], dtype=case.dtype,
              case_id=f"{case.id}, {name}")


def _bucket(distance: Tensor, buckets: int = 16, most: int = 64) -> Tensor:
    """T5's relative position bucket of k - q, both directions (Raffel et al. 2020)."""
    half = buckets // 2
    side = (distance > 0).to(torch.int64) * half
    near = half // 2
    size = distance.abs()
    far = near + (torch.log(size.float().clamp(min=1) / near) / math.log(most / near)
                  * (half - near)).to(torch.int64)
    return side + torch.where(size < near, size, far.clamp(max=half - 1))


def _causal(_):
    return None, lambda b, h, q, k: q >= k


def _window(_):
    return None, lambda b, h, q, k: (q >= k) & (q - k <= 20)


def _prefix(t):
    return None, lambda b, h, q, k: (k < t["prefix"][b]) | (k <= q)


def _document(t):
    return None, lambda b, h, q, k: t["document"][b, q] == t["document"][b, k]


def _alibi(t):
    return lambda s, b, h, q, k: s - t["slopes"][h] * (q - k).abs(), None


def _t5(t):
    return lambda s, b, h, q, k: s + t["table"][_bucket(k - q), h], None


def _softcap(_):
    return lambda s, b, h, q, k: 2.0 * torch.tanh(s / 2.0), None


def _neighbourhood(_):
    width = 10

    def near(b, h, q, k):
        return ((q // width - k // width).abs() <= 2) & ((q % width - k % width).abs() <= 3)

    return None, near


def _combined(t):
    """Everything at once: a learned table, a cap, documents, a window, -inf as a result."""
    def score_mod(s, b, h, q, k):
        s = 2.0 * torch.tanh(s / 2.0) + t["table"][h, (q - k).clamp(-4, 4) + 4] * torch.sigmoid(s)
        return torch.where(k == 3, -float("inf"), s * t["gain"])

    return score_mod, lambda b, h, q, k: ((t["document"][b, k] == t["document"][b, q % 37])
                                          & ((q - k).abs() < 30)) | (h == 1)


def _tensors(**shapes: tuple[int, ...]) -> Callable[[torch.Generator], dict[str, Tensor]]:
    return lambda generator: {name: torch.randn(shape, generator=generator)
                              for name, shape in shapes.items()}


def _documents(batch: int, seqlen: int) -> Callable[[torch.Generator], dict[str, Tensor]]:
    return lambda generator: {"document": torch.randint(
        0, 3, (batch, seqlen), generator=generator).sort(-1)[0].to(torch.int32)}


def _of_combined(generator: torch.Generator) -> dict[str, Tensor]:
    return {**_tensors(table=(4, 9))(generator), "gain": torch.tensor(0.75),
            **_documents(2, 53)(generator)}


CASES = [
    FlexCase("causal", _causal),
    FlexCase("sliding-window", _window),
    FlexCase("prefix-lm", _prefix, lambda _: {"prefix": torch.tensor([5, 40])}, batch=2,
             mask_batch=2),
    FlexCase("document", _document, _documents(2, 70), batch=2, mask_batch=2),
    FlexCase("alibi", _alibi, _tensors(slopes=(2,)), ("slopes",)),
    FlexCase("t5-bias", _t5, _tensors(table=(16, 2)), ("table",), batch=2, scale=1.0),
    FlexCase("softcap", _softcap),
    FlexCase("neighbourhood-2d", _neighbourhood),
]

COMBINED = [
    FlexCase("combined", _combined, _of_combined, ("table", "gain"), batch=2, num_heads_q=4,
             num_heads_kv=2, seqlen_q=70, seqlen_k=53, mask_batch=2, mask_heads=4, dtype=dtype)
    for dtype in DTYPE_NAMES
]
