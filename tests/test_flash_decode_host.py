"""The host side of decoding: routing, splits, memory, gradients, threads, torch.compile."""

import functools
import math
import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES, Case, make_inputs
from checks import attention_lowp, check, check_exact, check_same_bits
from decoding import ENTRIES, MAX_ROWS, check_decode, decode
from gradients import check_case_gradients
from test_backward_memory import peak_of
from test_flash_fwd_host import EMPTY

import torch_flash_mps
from torch_flash_mps.reference import attention_ref


@pytest.fixture(params=ENTRIES.values(), ids=ENTRIES.keys())
def entry(request) -> int | None:
    return request.param


def test_PY_12_explain_and_routing_agree(device, kernels):
    q, k, v = make_inputs(Case(1, 4, 2, 40, 80, 64, dtype=torch.float16), device).operands
    for rows in range(1, 20):
        plan = torch_flash_mps.explain(q[:, :, :rows], k, v, enable_gqa=True)
        expected = "flash_decode" if rows <= MAX_ROWS else "flash_fwd"
        assert plan["op"] == expected and plan["kernel"].startswith(f"{expected}_f16_d64_")
        decode(None, q[:, :, :rows], k, v)
        assert kernels()[0] == expected, rows


def test_sdpa_decodes(device, kernels):
    q, k, v = make_inputs(Case(1, 4, 2, 1, 80, 64), device).operands
    with torch_flash_mps.sdpa_enabled():
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert kernels()[0] == "flash_decode"
    check(out, attention_ref(q, k, v)[0], attention_lowp(q, k, v))


@pytest.mark.parametrize("rows", [1, 8, MAX_ROWS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_run_the_forward_whose_rounding_they_share(device, kernels, dtype, rows):
    for masked in (None, "float"):
        case = Case(2, 6, 2, rows, 70, 24, dtype=dtype, causal=masked is None, mask=masked)
        check_case_gradients(case, device, through_lse=True)
        ran = kernels()
        assert "flash_fwd" in ran and "flash_bwd_dkv" in ran and "flash_decode" not in ran
    q = torch.zeros(1, 1, rows, 24, dtype=dtype, device=device, requires_grad=True)
    assert torch_flash_mps.explain(q, q, q)["op"] == "flash_fwd"
    with torch.no_grad():
        torch_flash_mps.attention(q, q, q)
        assert kernels() == ["flash_decode"]


@pytest.mark.parametrize("rows", [1, MAX_ROWS])
def test_KF_06_memory_is_out_lse_and_the_scratch_of_the_splits(device, rows):
    q = torch.randn(1, 4, rows, 8, device=device)
    k, v = (torch.randn(1, 1, 16384, 8, device=device) for _ in range(2))
    mask = torch.ones(16384, dtype=torch.bool, device=device)[None]
    for splits in (0, 1, 7):
        used = splits or torch_flash_mps.explain(q, k, v, enable_gqa=True)["num_splits"]
        scratch = used * 4 * rows * (8 + 2) * 4 if used > 1 else 0
        peak = peak_of(functools.partial(decode, splits, q, k, v, attn_mask=mask))
        assert peak <= q.nbytes + 4 * rows * 4 + scratch


@pytest.mark.parametrize("dtype", DTYPES)
def test_HD_15_dirty_memory_changes_nothing(device, entry, dtype):
    inputs = make_inputs(Case(1, 6, 2, 3, 700, 64, dtype=dtype, mask="bool"), device)
    inputs.attn_mask[:, :, 1] = False
    inputs.attn_mask[:, :, 2, 100:] = False
    first = decode(entry, *inputs.operands, attn_mask=inputs.attn_mask)
    for _ in range(30):
        for elements in (6 * 3 * 64, 6 * 3, 5 * 6 * 3 * 64, 5 * 6 * 3, 5 * 6 * 3 * 66):
            for kind in (dtype, torch.float32):
                torch.full((elements,), torch.nan, device=device, dtype=kind)
        again = decode(entry, *inputs.operands, attn_mask=inputs.attn_mask)
        for one, other in zip(again, first, strict=True):
            assert not torch.isnan(one).any()
            check_same_bits(one, other)


@pytest.mark.parametrize("operand", range(3), ids=["query", "key", "value"])
def test_HD_11_offsets_beyond_2_to_the_31_elements(device, entry, operand):
    # Left uninitialised and hardly touched: 4 GiB of addresses.
    torch.utils.deterministic.fill_uninitialized_memory = False
    batch_stride = 2**31 + 64
    for shape, strides in (((2, 1, 3, 8), (batch_stride, 32, 8, 1)),
                           ((1, 2, 3, 8), (32, batch_stride, 8, 1)),
                           ((1, 1, 2, 8), (32, 32, batch_stride, 1))):
        operands = [torch.randn(shape, dtype=torch.float16) for _ in range(3)]
        on_device = [x.to(device) for x in operands]
        far = torch.empty(batch_stride + 32, dtype=torch.float16, device=device)
        on_device[operand] = far.as_strided(shape, strides).copy_(operands[operand])
        check_exact(decode(entry, *on_device)[0], attention_ref(*operands)[0], 2e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", range(1, 9))
def test_any_storage_offset(device, entry, dtype, offset):
    values = torch.randn(2000).to(device, dtype)
    q, k, v = (values[offset + i :].as_strided((1, 1, 9, 24), (0, 0, 24, 1)) for i in range(3))
    check_decode(entry, q, k, v, case_id=f"offset {offset}")
    overlapping = [values[offset + i :].as_strided((1, 2, 7, 16), (0, 40, 3, 1)) for i in range(3)]
    check_decode(entry, *overlapping, case_id=f"overlapping, offset {offset}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_HD_10_strides_of_size_1_dimensions_mean_nothing(device, entry, dtype):
    plain = [torch.randn(1, 1, seqlen, 16).to(device, dtype) for seqlen in (1, 17, 17)]
    odd = [x.as_strided(x.shape, (2**33, 7, 16, 1)) for x in plain]
    odd[0] = plain[0].as_strided((1, 1, 1, 16), (2**33, 2**40, 0, 1))
    for got, expected in zip(decode(entry, *odd), decode(entry, *plain), strict=True):
        check_same_bits(got, expected)
    assert torch_flash_mps.explain(*odd) == torch_flash_mps.explain(*plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EMPTY)
def test_HD_09_empty_sizes(device, entry, name, dtype):
    q, k, v = (torch.ones(shape, dtype=dtype) for shape in EMPTY[name])
    if entry is not None and 0 in (k.shape[1], k.shape[3], v.shape[3]):
        with pytest.raises(RuntimeError, match="attention_with_kvcache: expected"):
            decode(entry, *(x.to(device) for x in (q, k, v)))
        return
    out, lse = decode(entry, *(x.to(device) for x in (q, k, v)), scale=0.0)
    check_exact(out, F.scaled_dot_product_attention(q, k, v), 1e-6)
    assert lse.shape == q.shape[:-1]
    check_exact(lse, math.log(k.shape[2]) if k.shape[2] else -math.inf, 1e-6)


def test_HD_03_threads_at_once(device, entry):
    failures = []

    def attend(seqlen_k):
        q, k, v = make_inputs(Case(2, 4, 2, 1 + seqlen_k % 3, seqlen_k)).operands
        expected, _ = attention_ref(q, k, v)
        for _ in range(20):
            check_exact(decode(entry, *(x.to(device) for x in (q, k, v)))[0], expected, 1e-5)

    def run(seqlen_k):
        try:
            attend(seqlen_k)
        except BaseException as error:   # noqa: BLE001, a thread has nobody else to tell
            failures.append(error)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in (9, 130, 300, 701)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "a thread hangs"
    assert not failures, failures


ORDERED = """
import sys
import torch
if sys.platform == "linux":
    import torch_flash_mps.simulator as simulator
    simulator.checks(True)
    simulator.shuffle(1)
import torch_flash_mps
torch.manual_seed(0)
operands = [torch.randn(1, 6 if rows == 50 else 2, rows, 16) for rows in (50, 200, 200)]
q, k, v = (operand.to("mps") for operand in operands)
attend = torch.ops.flash_mps.attention_with_kvcache
results = [attend(q, k, v, is_causal=True, num_splits=4) for _ in range(3)]
torch.mps.synchronize()
names = [c["kernel"] for c in simulator.counters()] if sys.platform == "linux" else None
torch.save((operands, [(out.cpu(), lse.cpu()) for out, lse in results], names), sys.argv[1])
"""


def test_HD_04_HD_13_dispatches_that_depend_on_each_other_are_ordered(tmp_path):
    """Rows over several dispatches, then their second pass, in a concurrent encoder."""
    result = tmp_path / "result.pt"
    subprocess.run([sys.executable, "-c", ORDERED, str(result)], check=True, env={
        **os.environ, "TORCH_FLASH_MPS_SIM_CONCURRENT": "1",
        "TORCH_FLASH_MPS_MAX_DISPATCH_FLOP": "1e6"})
    operands, results, names = torch.load(result)
    if names is not None:
        assert sum(name.startswith("flash_decode_f32") for name in names) > 3
        assert sum(name.startswith("flash_decode_combine") for name in names) == 3
    for got in results:
        expected = attention_ref(*operands, is_causal=True, causal_offset=150)
        for one, other in zip(got, expected, strict=True):
            check_exact(one, other, 1e-5)


WITH_KVCACHE = {
    "plain": (Case(2, 4, 2, 3, 33), {}),
    "causal": (Case(2, 4, 2, 3, 33, causal=True), {"num_splits": 3}),
    "float-mask": (Case(2, 4, 4, 1, 33, mask="float_rows", scale=0.3), {}),
    "value-dim": (Case(2, 4, 1, 19, 33, 64, 40), {}),
    "bshd": (Case(2, 4, 2, 3, 33, layout="bshd"), {}),
    "one-row-bshd": (Case(2, 4, 2, 1, 33, layout="bshd"), {}),
    "bf16": (Case(2, 4, 4, 2, 33, dtype=torch.bfloat16), {}),
}


@pytest.mark.parametrize("name", WITH_KVCACHE)
def test_PY_09_opcheck_with_kvcache(place, name):
    case, options = WITH_KVCACHE[name]
    inputs = make_inputs(case, place)
    op = torch.ops.flash_mps.attention_with_kvcache.default
    result = torch.library.opcheck(op, inputs.operands, inputs.options | options)
    assert set(result.values()) == {"SUCCESS"}
    operands = [x.contiguous().transpose(1, 2).contiguous().transpose(1, 2) if "bshd" in name
                else x.contiguous() for x in inputs.operands]
    mode = torch._subclasses.FakeTensorMode()
    fake = op(*(mode.from_tensor(x) for x in operands))
    for one, other in zip(op(*operands), fake, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def test_HD_12_a_new_length_never_means_a_new_kernel(device, simulator):
    k = torch.zeros(1, 1, 4096, 64, device=device)
    q = k[:, :, :1]

    def attend(seqlen_k):
        decode(None, q, k[:, :, :seqlen_k], k[:, :, :seqlen_k])
        torch.mps.synchronize()

    attend(1)
    attend(4096)
    pipelines = simulator.stats()["pipelines_built"] if simulator else 0
    memory = torch.mps.driver_allocated_memory()
    for seqlen_k in (*range(2, 400, 3), *range(500, 4097, 311)):
        attend(seqlen_k)
    if simulator:
        assert simulator.stats()["pipelines_built"] == pipelines
    assert torch.mps.driver_allocated_memory() - memory < 2**20
