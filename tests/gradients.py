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
    with_delta: bool = False, **options,
) -> dict[str, Tensor]:
    """Judges every gradient of the op, shape and dtype included. Returns them.

    With `with_delta` the error of plain torch is at least that of `errors_of_delta`.
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
    of_delta = errors_of_delta(exact, operands, grad_out) if with_delta else {}
    assert list(got) == list(ref)
    for name, gradient in got.items():
        assert gradient.dtype == operands[name].dtype, f"{case_id}: dtype of {name}'s gradient"
        assert gradient.device == operands[name].device
        slack = sinks_slack(grad_out) if name == "sinks" else 0.0
        if with_delta:
            slack += 2 * max(0.0, of_delta[name] - largest(lowp[name].double() - ref[name]))
        check(gradient, ref[name], lowp[name], dtype=dtype, case_id=f"{case_id}, {name}",
              slack=slack)
    return got


def largest(x: Tensor) -> float:
    """The largest magnitude of the finite elements; 0 where there is none."""
    finite = x[torch.isfinite(x)]
    return finite.abs().amax().item() if finite.numel() else 0.0


def sinks_slack(grad_out: Tensor) -> float:
    """What the rounding of `out` may cost the gradient of a sink, a sum over all of a head."""
    terms = grad_out.numel() / max(grad_out.shape[1], 1)
    return torch.finfo(grad_out.dtype).eps / 2 * math.sqrt(terms)


def errors_of_delta(
    exact: Callable[..., tuple[Tensor, Tensor]], operands: Operands, grad_out: Tensor,
) -> dict[str, float]:
    """The error of each gradient when plain torch has delta = rowsum(dO O) from a rounded O.

    Where every row sees one key, plain softmax makes no error at all, but dS = P (dP - delta) does,
    which is the maths of the kernels. As d lse / dS = P, the error is the gradient, through lse, of
    delta's error; and dP, a sum of the same kind, doubles it.
    """
    out, _ = exact(*(operands[name] for name in NAMES if name in operands))
    out, grad = out.detach(), grad_out.cpu()
    delta = (grad.float() * out.to(grad.dtype).float()).sum(-1)
    error = delta.double() - (grad.double() * out).sum(-1)
    moved = gradients(exact, operands, torch.zeros_like(grad_out), error, torch.float64)
    return {name: 2 * largest(gradient) for name, gradient in moved.items()}


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
    with_delta: bool = False,
):
    """`check_gradients` on the random inputs of a case."""
    grad_out, grad_lse = output_gradients(case, device)
    return check_gradients(case_operands(case, device, seed), grad_out,
                           grad_lse if through_lse else None, case_id=case.id,
                           with_delta=with_delta, **case_options(case, device))
