"""The op as PyTorch sees it: schema, fake kernel, torch.compile, explain()."""


import pytest
import torch
from cases import DTYPES, Case, make_inputs
from checks import attention_lowp, check, check_exact

import torch_flash_mps
from torch_flash_mps.reference import attention_ref

OPS = [torch.ops.flash_mps.attention.default, torch.ops.flash_mps.attention_with_lse.default]
BACKWARD = torch.ops.flash_mps.attention_backward.default

OPTIONS = {
    "plain": (Case(2, 4, 4, 19, 33), {}),
    "causal": (Case(2, 4, 4, 19, 33, causal=True), {}),
    "gqa": (Case(2, 4, 2, 19, 33, mask="bool"), {"enable_gqa": True}),
    "float-mask": (Case(2, 4, 4, 19, 33, mask="float_rows", scale=0.3), {}),
    "value-dim": (Case(2, 4, 4, 19, 33, 64, 40), {}),
    "bshd": (Case(2, 4, 4, 19, 33, layout="bshd"), {}),
    "bf16": (Case(2, 4, 4, 19, 33, dtype=torch.bfloat16), {}),
    "window": (Case(2, 4, 4, 19, 33, window=(3, 8), causal=True), {}),
    "scores": (Case(2, 4, 2, 19, 33, mask="float_heads", softcap=2.0, alibi="batch", sinks=True,
                    window=(-1, 5)), {"enable_gqa": True}),
}


@pytest.mark.parametrize("where", ["mps", "cpu"])
@pytest.mark.parametrize("wants_gradients", [False, True])
@pytest.mark.parametrize("op", OPS, ids=["attention", "attention_with_lse"])
@pytest.mark.parametrize("name", OPTIONS)
def test_PY_09_opcheck(device, where, op, wants_gradients, name):
    case, options = OPTIONS[name]
    inputs = make_inputs(case, device if where == "mps" else "cpu")
    operands, given = inputs.operands, inputs.options | options
    if wants_gradients:
        operands = [x.detach().requires_grad_() for x in operands]
        mask = inputs.attn_mask
        if mask is not None and mask.is_floating_point():
            given["attn_mask"] = mask.masked_fill(mask == -torch.inf, -9.0).requires_grad_()
        if case.sinks:
            given["sinks"] = given["sinks"].detach().requires_grad_()
    tests = torch.library.opcheck.__kwdefaults__["test_utils"]
    if where == "mps":   # of which this one knows nothing
        tests = [one for one in tests if one != "test_autograd_registration"]
    result = torch.library.opcheck(op, tuple(operands), given, test_utils=tests)
    assert set(result.values()) == {"SUCCESS"}


def backward_arguments(case, options, place, output_mask):
    """Arguments of the backward op that fit each other."""
    inputs = make_inputs(case, place)
    q, k, v = inputs.operands
    out, lse = torch.ops.flash_mps.attention_with_lse(q, k, v, **inputs.options, **options)
    has_float_mask = inputs.attn_mask is not None and inputs.attn_mask.is_floating_point()
    arguments = (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse,
                 inputs.attn_mask, 0.0, inputs.is_causal)
    return arguments, {
        "scale": inputs.scale, "enable_gqa": False, "window_left": -1, "window_right": -1,
        "softcap": 0.0, "alibi_slopes": None, "sinks": None, "is_bottom_right": False,
        "rng_state": None,
        "output_mask": [*output_mask, has_float_mask, case.sinks],
    } | inputs.score_options | options


@pytest.mark.parametrize("where", ["mps", "cpu"])
@pytest.mark.parametrize("name", OPTIONS)
def test_PY_09_opcheck_of_backward(device, where, name):
    place = device if where == "mps" else "cpu"
    for output_mask in ((True, True, True), (False, True, False)):
        arguments, options = backward_arguments(*OPTIONS[name], place, output_mask)
        result = torch.library.opcheck(BACKWARD, arguments, options)
        assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("where", ["mps", "cpu"])
def test_backward_says_what_does_not_fit(device, where):
    place = device if where == "mps" else "cpu"
    arguments, options = backward_arguments(Case(1, 2, 2, 5, 7, 8), {}, place, (True,) * 3)
    grad_out, grad_lse, *operands, out, lse = arguments[:7]
    rest = arguments[7:]
    short = grad_out[:, :, :4]
    for changed, said in (
        ((short, grad_lse, *operands, out, lse), r"grad_out of shape \[1, 2, 5, 8\], got \[1"),
        ((grad_out.half(), grad_lse, *operands, out, lse), "grad_out of dtype Float, got Half"),
        ((grad_out, grad_lse[:, :1], *operands, out, lse), r"grad_lse of shape \[1, 2, 5\], got"),
        ((grad_out, grad_lse, *operands, short, lse), r"out of shape \[1, 2, 5, 8\], got"),
        ((grad_out, grad_lse, *operands, out, lse.half()), "lse of dtype Float, got Half"),
    ):
        with pytest.raises(RuntimeError, match=f"attention_backward: expected {said}"):
            BACKWARD(*changed, *rest, **options)
    with pytest.raises(RuntimeError, match="expected sinks where their gradient .* got none"):
        BACKWARD(*arguments, **options | {"output_mask": [True] * 3 + [False, True]})
    with pytest.raises(RuntimeError, match="float attn_mask where its gradient is .* got none"):
        BACKWARD(*arguments, **options | {"output_mask": [True] * 4 + [False]})


@pytest.mark.parametrize("where", ["mps", "cpu"])
@pytest.mark.parametrize("rank", [3, 4])
def test_backward_takes_results_of_any_strides(device, where, rank):
    place = device if where == "mps" else "cpu"
    arguments, options = backward_arguments(Case(1, 2, 2, 5, 7, 8), {}, place, (True,) * 3)
    tensors = [x.squeeze(0) if rank == 3 else x for x in arguments[:7]]
    strided = [torch.stack((x, x), -1)[..., 1] for x in tensors]
    assert not any(x.is_contiguous() for x in strided)
    for got, expected in zip(BACKWARD(*strided, *arguments[7:], **options),
                             BACKWARD(*tensors, *arguments[7:], **options), strict=True):
        check_exact(got, expected, 1e-6)


def _models_layout(batch, seqlen, heads, head_dim, device, dtype=torch.float32):
    """What models pass: a [B, S, H, D] projection seen as [B, H, S, D]."""
    generator = torch.Generator().manual_seed(seqlen)
    x = torch.randn(batch, seqlen, heads, head_dim, generator=generator).to(device, dtype)
    return x.transpose(1, 2)


LAYOUTS = {
    "models": lambda device: [_models_layout(2, 117, 4, 64, device, torch.bfloat16)] * 3,
    "dense": lambda device: [torch.randn(2, 4, 17, 64, device=device)] * 3,
    "one-token": lambda device: [
        _models_layout(2, 1, 4, 64, device), *[_models_layout(2, 33, 4, 64, device)] * 2],
    "one-head": lambda device: [_models_layout(2, 9, 1, 64, device)] * 3,
    "rank-3": lambda device: [torch.randn(4, 9, 64, device=device)] * 3,
    "rank-2": lambda device: [torch.randn(9, 64, device=device)] * 3,
    "rank-5": lambda device: [torch.randn(2, 3, 4, 9, 8, device=device)] * 3,
    "value-dim": lambda device: [
        *[_models_layout(2, 9, 4, 64, device)] * 2, _models_layout(2, 9, 4, 24, device)],
    "broadcast-batch": lambda device: [
        torch.randn(1, 4, 9, 8, device=device), *[torch.randn(3, 4, 5, 8, device=device)] * 2],
    "empty": lambda device: [torch.randn(2, 4, 0, 8, device=device)] * 3,
    "permuted": lambda device: [torch.randn(9, 2, 8, 4, device=device).permute(1, 3, 0, 2)] * 3,
}


@pytest.mark.parametrize("op", OPS, ids=["attention", "attention_with_lse"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("where", ["mps", "cpu"])
def test_PY_09_fake_strides_equal_real_ones(device, op, name, where):
    operands = LAYOUTS[name](device if where == "mps" else "cpu")
    real = op(*operands)
    mode = torch._subclasses.FakeTensorMode()
    fake = op(*(mode.from_tensor(x) for x in operands))
    pairs = zip(*(x if isinstance(x, tuple) else (x,) for x in (real, fake)), strict=True)
    for one, other in pairs:
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert one.device.type == other.device.type


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("where", ["mps", "cpu"])
def test_PY_09_fake_strides_of_gradients_equal_real_ones(device, name, where):
    operands = LAYOUTS[name](device if where == "mps" else "cpu")
    mode = torch._subclasses.FakeTensorMode()
    results = []
    for q, k, v in (operands, [mode.from_tensor(x) for x in operands]):
        mask = q.new_zeros(q.size(-2), k.size(-2))
        out, lse = torch.ops.flash_mps.attention_with_lse(q, k, v, mask)
        results.append(BACKWARD(
            torch.ones_like(out), None, q, k, v, out, lse, mask, 0.0, False, scale=None,
            enable_gqa=False, window_left=-1, window_right=-1, softcap=0.0, alibi_slopes=None,
            sinks=None, is_bottom_right=False, rng_state=None, output_mask=[True] * 4 + [False],
        ))
    for one, other in zip(*results, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_HD_06_the_same_op_on_cpu_tensors(name, dtype):
    case, options = OPTIONS[name]
    inputs = make_inputs(case)
    operands = [x.to(dtype) for x in inputs.operands]
    mask = inputs.attn_mask
    given = inputs.options | {"attn_mask": mask}
    out, lse = torch.ops.flash_mps.attention_with_lse(*operands, **given, **options)
    ref, ref_lse = attention_ref(*operands, **given)
    assert out.dtype == dtype and out.device.type == "cpu"
    check(out, ref, attention_lowp(*operands, **given), case_id=name)
    check_exact(lse, ref_lse, 2e-5, case_id=name)


def test_PY_12_explain_says_what_would_run(device):
    q, k, v = make_inputs(Case(1, 4, 2, 40, 80, 64, dtype=torch.float16), device).operands
    plan = torch_flash_mps.explain(q, k, v, enable_gqa=True)
    assert plan["kernel"].startswith("flash_fwd_f16_d64_")
    assert f"bq{plan['block_q']}_bk{plan['block_k']}_sg{plan['num_simdgroups']}" in plan["kernel"]
    assert plan["path"] in ("staged", "direct")
    assert plan["num_dispatches"] == 1
    assert not plan["reason"]


def test_PY_12_explain_gives_the_reason_why_nothing_would_run(device):
    for seqlen, most, found in ((17, 576, 577), (2, 576, 600)):
        q = torch.zeros(1, 1, seqlen, found, device=device)
        plan = torch_flash_mps.explain(q, q, q)
        assert plan["kernel"] is None
        assert f"at most {most}" in plan["reason"] and str(found) in plan["reason"]


@pytest.mark.parametrize("lengths", [range(17, 200, 3), range(1, 600, 9)], ids=["fwd", "decode"])
def test_HD_12_a_new_length_never_means_a_new_kernel(device, simulator, lengths):
    is_decode = lengths.start == 1

    def attend(seqlen):
        k = torch.zeros(1, 1, seqlen, 64, device=device)
        q = k[:, :, :1] if is_decode else k
        torch.ops.flash_mps.attention(q, k, k)
        return torch_flash_mps.explain(q, k, k)["kernel"]

    name = attend(lengths.start)
    attend(lengths.stop)   # a decode of that many keys is split
    torch.mps.synchronize()
    pipelines = simulator.stats()["pipelines_built"] if simulator else 0
    memory = torch.mps.driver_allocated_memory()
    assert {attend(seqlen) for seqlen in lengths} == {name}
    torch.mps.synchronize()
    if simulator:
        assert simulator.stats()["pipelines_built"] == pipelines
    assert torch.mps.driver_allocated_memory() - memory < 2**20


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "heads"), [(131072, 131072, 32), (8192, 131072, 32), (1024, 1024, 8)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_HD_13_long_work_is_split(device, seqlen_q, seqlen_k, heads, causal):
    row = torch.zeros(1, 1, 1, 128, device=device, dtype=torch.float16)
    q, k = row.expand(1, heads, seqlen_q, 128), row.expand(1, heads, seqlen_k, 128)
    plan = torch_flash_mps.explain(q, k, k, is_causal=causal)
    pairs = seqlen_q * (seqlen_q + 1) // 2 if causal else seqlen_q * seqlen_k
    work = 2 * 2 * 128 * heads * pairs
    # At most 1e12 operations each: under half a second on the smallest Apple GPU (2.6 TFLOPS).
    assert plan["num_dispatches"] >= work / 1e12
    assert plan["num_dispatches"] <= max(1, work / 1e11)
