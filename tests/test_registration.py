"""The op as PyTorch sees it: schema, fake kernel, torch.compile, gradients off, explain()."""

import sys

import pytest
import torch
import torch._dynamo.testing
from cases import DTYPES, Case, make_inputs
from checks import attention_lowp, check, check_exact

import torch_flash_mps
from torch_flash_mps.reference import attention_ref

BACKEND = "inductor" if sys.platform == "darwin" else "aot_eager"
OPS = [torch.ops.flash_mps.attention.default, torch.ops.flash_mps.attention_with_lse.default]

OPTIONS = {
    "plain": (Case(2, 4, 4, 19, 33), {}),
    "causal": (Case(2, 4, 4, 19, 33, causal=True), {}),
    "gqa": (Case(2, 4, 2, 19, 33, mask="bool"), {"enable_gqa": True}),
    "float-mask": (Case(2, 4, 4, 19, 33, mask="float_rows", scale=0.3), {}),
    "value-dim": (Case(2, 4, 4, 19, 33, 64, 40), {}),
    "bshd": (Case(2, 4, 4, 19, 33, layout="bshd"), {}),
    "bf16": (Case(2, 4, 4, 19, 33, dtype=torch.bfloat16), {}),
}


@pytest.mark.parametrize("where", ["mps", "cpu"])
@pytest.mark.parametrize("op", OPS, ids=["attention", "attention_with_lse"])
@pytest.mark.parametrize("name", OPTIONS)
def test_PY_09_opcheck(device, where, op, name):
    case, options = OPTIONS[name]
    inputs = make_inputs(case, device if where == "mps" else "cpu")
    result = torch.library.opcheck(
        op, inputs.operands, inputs.options | options,
        test_utils=["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"],
    )
    assert set(result.values()) == {"SUCCESS"}


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


@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize("grouped", [False, True])
def test_PY_09_compiled_equals_eager_for_every_length(device, mask, grouped):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(BACKEND)

    def attend(q, k, v, mask):
        return torch.ops.flash_mps.attention(q, k, v, mask, scale=0.2, enable_gqa=grouped) * 2

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    for seqlen_q, seqlen_k in ((17, 33), (40, 65), (9, 21)):
        case = Case(2, 4, 2 if grouped else 4, seqlen_q, seqlen_k, mask=mask)
        inputs = make_inputs(case, device)
        arguments = (*inputs.operands, inputs.attn_mask)
        check_exact(compiled(*arguments), attend(*arguments))
    assert counter.frame_count == 1


def test_PY_09_compiled_function_with_lse(device):
    torch._dynamo.reset()

    def attend(q, k, v):
        return torch_flash_mps.attention(q, k, v, is_causal=True, return_lse=True)

    operands = make_inputs(Case(1, 2, 2, 20, 20), device).operands
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=BACKEND)
    for one, other in zip(compiled(*operands), attend(*operands), strict=True):
        check_exact(one, other)


def test_without_gradients_every_mode_agrees(device):
    case = Case(1, 2, 2, 9, 9)
    q, k, v = make_inputs(case, device).operands
    wanted = q.clone().requires_grad_()
    plain = torch.ops.flash_mps.attention(wanted.detach(), k, v)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            check_exact(torch.ops.flash_mps.attention(wanted, k, v), plain)


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
    q = torch.zeros(1, 1, 2, 300, device=device)
    plan = torch_flash_mps.explain(q, q, q)
    assert plan["kernel"] is None
    assert "at most 256" in plan["reason"] and "300" in plan["reason"]


def test_HD_12_a_new_length_never_means_a_new_kernel(device, simulator):
    def attend(seqlen):
        q = torch.zeros(1, 1, seqlen, 64, device=device)
        torch.ops.flash_mps.attention(q, q, q)
        return torch_flash_mps.explain(q, q, q)["kernel"]

    name = attend(200)
    torch.mps.synchronize()
    pipelines = simulator.stats()["pipelines_built"] if simulator else 0
    memory = torch.mps.driver_allocated_memory()
    assert {attend(seqlen) for seqlen in range(1, 200, 3)} == {name}
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
