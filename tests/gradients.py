"""How gradients are judged: against float64 autograd through the oracle, by `checks.check`."""

import math
from collections.abc import Callable

import torch
from cases import Case, make_inputs, score_options
from checks import attention_and_lse_lowp, check, in_words_of_reference
from torch import Tensor

from torch_flash_mps.reference import attention_ref

NAMES = ("query", "key", "value", "attn_mask", "sinks")

#: Every operand by name; a mask may be None, sinks may be left out.
Operands = dict[str, Tensor | None]


def attend(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, sinks: Tensor | None = None,
    **options,
):
    """Out and lse of the op; `enable_gqa` is set where the head counts ask for it."""
    return torch.ops.flash_mps.attention_with_lse(
        q, k, v, attn_mask=attn_mask, sinks=sinks,
        enable_gqa=q.dim() > 2 and q.shape[-3] != k.shape[-3], **options,
    )


def gradients(
    function: Callable[..., tuple[Tensor, Tensor]], operands: Operands, grad_out: Tensor,
    grad_lse: Tensor | None = None, dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Gradients of all floating-point operands of `function(q, k, v, attn_mask[, sinks])`.

    With a `dtype` the operands are first taken to the CPU and to that dtype.
    """
    def leaf(x: Tensor | None) -> Tensor | None:
        if x is None or not x.is_floating_point():
            return x if x is None or dtype is None else x.cpu()
        return (x if dtype is None else x.cpu().to(dtype)).detach().requires_grad_()

    leaves = {name: leaf(operands[name]) for name in NAMES if name in operands}
    wanted = {name: x for name, x in leaves.items() if x is not None and x.requires_grad}
    out, lse = function(*leaves.values())
    outputs, grads = ([out], [grad_out]) if grad_lse is None else ([out, lse], [grad_out, grad_lse])
    grads = [grad.to(one) for grad, one in zip(grads, outputs, strict=True)]
    return dict(zip(wanted, torch.autograd.grad(outputs, list(wanted.values()), grads),
                    strict=True))


def check_gradients(
    operands: Operands, grad_out: Tensor, grad_lse: Tensor | None = None, case_id: str = "",
    with_rounding: bool = False, **options,
) -> dict[str, Tensor]:
    """Judges every gradient of the op, shape and dtype included. Returns them.

    With `with_rounding` each may be off by its `rounding_bounds` besides: for inputs that were
    searched for the worst. These bounds are far below what wrong maths makes.
    """
    got = gradients(lambda *x: attend(*x, **options), operands, grad_out, grad_lse)
    meant = in_words_of_reference(options, operands["query"], operands["key"])

    def exact(q, k, v, mask, sinks=None):
        return attention_ref(q, k, v, attn_mask=mask, sinks=sinks, **meant)

    def plain(q, k, v, mask, sinks=None):
        return attention_and_lse_lowp(q, k, v, attn_mask=mask, sinks=sinks, **meant)

    dtype = operands["query"].dtype
    ref = gradients(exact, operands, grad_out, grad_lse, torch.float64)
    lowp = gradients(plain, operands, grad_out, grad_lse, dtype)
    bounds = rounding_bounds(operands, grad_out, grad_lse, **meant) if with_rounding else {}
    assert list(got) == list(ref)
    for name, gradient in got.items():
        assert gradient.dtype == operands[name].dtype, f"{case_id}: dtype of {name}'s gradient"
        assert gradient.device == operands[name].device
        slack = sinks_slack(grad_out) if name == "sinks" else 0.0
        slack += bounds.get(name, 0.0)
        check(gradient, ref[name], lowp[name], dtype=dtype, case_id=f"{case_id}, {name}",
              slack=slack)
    return got


def sinks_slack(grad_out: Tensor) -> float:
    """What the rounding of `out` may cost the gradient of a sink, a sum over all of a head."""
    terms = grad_out.numel() / max(grad_out.shape[1], 1)
    return torch.finfo(grad_out.dtype).eps / 2 * math.sqrt(terms)


def rounding_bounds(
    operands: Operands, grad_out: Tensor, grad_lse: Tensor | None, **options,
) -> dict[str, float]:
    """How far float32 sums and an O rounded to its dtype can put each gradient off.

    Of the maths of the kernels (Dao 2023, "FlashAttention-2", algorithm 2):
    dV = Pᵀ dO, dS = P (dP - delta), delta = rowsum(dO O) - dlse, dQ = dS K, dK = dSᵀ Q. An inner
    product of n terms is off by at most gamma_n |x|.|y|, gamma_n = n u / (1 - n u), in whatever
    order (Higham 2002, "Accuracy and Stability of Numerical Algorithms", (3.5)). Plain torch may be
    far better: where every row sees one key, its softmax and dS are exact.
    """
    query, key, value, mask = (operands[name] for name in NAMES[:4])
    bias = additive_mask(mask, (*query.shape[:3], key.shape[2])).requires_grad_()
    options["sinks"] = operands.get("sinks")
    out, lse = attention_ref(query, key, value, attn_mask=bias, **options)
    (p,) = torch.autograd.grad(lse.sum(), bias)
    group_size = query.shape[1] // max(key.shape[1], 1)
    q, k, v, o, do = (x.detach().cpu().double().abs() for x in (query, key, value, out, grad_out))
    k, v = (x.repeat_interleave(group_size, 1) for x in (k, v))
    dropout_p = options.get("dropout_p", 0.0)
    kept = 1 / (1 - dropout_p) if dropout_p < 1 else 0.0
    scale = 1 / math.sqrt(q.shape[-1]) if options.get("scale") is None else abs(options["scale"])

    # Magnitudes, and with gamma their errors; the last two operations of dS are two terms more.
    dp = kept * do @ v.transpose(-1, -2)
    delta = (do * o).sum(-1, keepdim=True)
    dlse = torch.zeros(()) if grad_lse is None else grad_lse.cpu().double().abs().unsqueeze(-1)
    of_delta = (gamma(v.shape[-1] + 2) + torch.finfo(grad_out.dtype).eps / 2) * delta
    of_ds = p * (gamma(v.shape[-1] + 2) * dp + of_delta + gamma(2) * dlse)
    ds = p * (dp + delta + dlse)
    rows = group_size * query.shape[2]
    bounds = {
        "query": scale * (of_ds + gamma(key.shape[2]) * ds) @ k,
        "key": scale * per_kv_head((of_ds + gamma(rows) * ds).transpose(-1, -2) @ q, group_size),
        "value": per_kv_head(gamma(rows) * kept * p.transpose(-1, -2) @ do, group_size),
        "sinks": ((1 - p.sum(-1, keepdim=True)).clamp(min=0) * of_delta).sum((0, 2, 3)),
    }
    if mask is not None:
        terms = ds.numel() // max(mask.numel(), 1)
        bounds["attn_mask"] = (of_ds + gamma(terms) * ds).sum_to_size(mask.shape)
    return {name: bound.amax().item() if bound.numel() else 0.0 for name, bound in bounds.items()}


def gamma(terms: int) -> float:
    """The relative error of a float32 inner product."""
    error = terms * torch.finfo(torch.float32).eps / 2
    return error / (1 - error)


def per_kv_head(x: Tensor, group_size: int) -> Tensor:
    """`[B, Hq, ...]` summed over the query heads that share a KV head."""
    return x.unflatten(1, (-1, group_size)).sum(2)


def additive_mask(mask: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """The same mask in float64 on the CPU, to be added to scores of this shape."""
    mask = torch.zeros(()) if mask is None else mask.detach().cpu()
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    return mask.double().expand(shape).clone()


def case_operands(case: Case, device: torch.device | str, seed: int = 0) -> Operands:
    """The operands of `make_inputs` that may have gradients, by name."""
    inputs = make_inputs(case, device, seed)
    operands: Operands = {"query": inputs.query, "key": inputs.key, "value": inputs.value,
                          "attn_mask": inputs.attn_mask}
    return operands | ({"sinks": inputs.score_options["sinks"]} if case.sinks else {})


def case_options(case: Case, device: torch.device | str = "cpu") -> dict:
    """The others."""
    options = score_options(case, device)
    options.pop("sinks", None)
    return {"is_causal": case.causal, "scale": case.scale} | options


def output_gradients(case: Case, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Random gradients of out (in query's dtype) and of lse."""
    generator = torch.Generator().manual_seed(1)
    rows = (case.batch, case.num_heads_q, case.seqlen_q)
    grad_out = torch.randn(*rows, case.value_dim, generator=generator).to(case.dtype)
    return grad_out.to(device), torch.randn(rows, generator=generator).to(device)


def check_case_gradients(
    case: Case, device: torch.device, *, through_lse: bool = False, seed: int = 0,
    with_rounding: bool = False,
):
    """`check_gradients` on the random inputs of a case."""
    grad_out, grad_lse = output_gradients(case, device)
    return check_gradients(case_operands(case, device, seed), grad_out,
                           grad_lse if through_lse else None, case_id=case.id,
                           with_rounding=with_rounding, **case_options(case, device))
