"""flex_attention: scores and visibility of the caller's, forward, gradients and decode."""

from dataclasses import replace

import pytest
import torch
from cases import poisoned
from checks import check, check_exact, check_same_bits
from flex_cases import CASES, COMBINED, FlexCase, check_call, make_call, plain_attention
from torch.nn.attention.flex_attention import create_block_mask

import torch_flash_mps
from torch_flash_mps import flex_attention
from torch_flash_mps.flex import captured_gradient


@pytest.mark.parametrize("case", CASES + COMBINED, ids=lambda case: case.id)
def test_out_lse_and_gradients(device, checked, case):
    check_call(make_call(case, device))


@pytest.mark.parametrize("case", [*CASES, COMBINED[0]], ids=lambda case: case.id)
def test_on_the_cpu(case):
    check_call(make_call(case, "cpu"))


@pytest.mark.parametrize("family", ["apple9"])
def test_on_the_direct_path(device, on_family, family):
    assert on_family(family)
    check_call(make_call(COMBINED[0], device))


@pytest.mark.parametrize("seqlens", [(1, 53), (5, 53), (16, 53)], ids=str)
def test_few_queries_are_decoded(device, checked, kernels, seqlens):
    case = replace(COMBINED[1], seqlen_q=seqlens[0], seqlen_k=seqlens[1])
    call = make_call(case, device)
    kernels()
    with torch.no_grad():
        out, lse = call.run()
    assert "flash_decode" in kernels()
    ref_out, ref_lse, _ = call.reference(torch.float64)
    check(out, ref_out, call.reference(case.dtype)[0], case_id=case.id)
    check_exact(lse, ref_lse, 3e-5)


def test_a_fault_in_a_function_would_show(device):
    """The judge sees a window that is off by one."""
    call = make_call(CASES[1], device)
    call.case = replace(call.case, functions=lambda t: (None, lambda b, h, q, k:
                                                        (q >= k) & (q - k <= 21)))
    with pytest.raises(AssertionError, match="sliding-window"):
        check_call(call)


def test_gradients_have_the_same_bits_on_every_run(device, simulator, seed):
    call = make_call(COMBINED[0], device)
    first = call.gradients(*call.run(), call.operands)
    for shuffled in (None, seed, seed + 1):
        if simulator is not None:
            simulator.shuffle(shuffled)
        for name, gradient in call.gradients(*call.run(), call.operands).items():
            check_same_bits(gradient.reshape(-1), first[name].reshape(-1), name)
    if simulator is not None:
        simulator.shuffle(None)


def test_gradient_of_a_table_in_many_chunks(device, monkeypatch):
    """Rows are gone through a few at a time, the last of them fewer."""
    monkeypatch.setattr(captured_gradient, "PAIRS_AT_ONCE", 1500)
    check_call(make_call(CASES[5], device))


def test_gradient_of_a_captured_tensor_alone(device):
    call = make_call(CASES[5], device)
    for name in ("query", "key", "value"):
        call.operands[name] = call.operands[name].detach()
    out, lse = call.run()
    (gradient,) = torch.autograd.grad(out, [call.operands["table"]], call.grads[0].to(device))
    call.grads = (call.grads[0], torch.zeros_like(call.grads[1]))
    _, _, expected = call.reference(torch.float64)
    check(gradient, expected["table"], call.reference(torch.float32)[2]["table"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_captured_tensors_of_16_bits(device, dtype):
    """Sums of them are float32, and their gradient has their dtype."""
    def functions(t):
        return lambda s, b, h, q, k: s + t["x"][h] * t["y"][q] + t["x"][b], None

    case = FlexCase("16-bit", functions,
                    lambda g: {"x": torch.randn(2, generator=g).to(dtype),
                               "y": torch.randn(70, generator=g).to(dtype)}, ("x",))
    call = make_call(case, device)
    call.operands["x"] = call.operands["x"].detach().requires_grad_()
    out, lse = call.run()
    x, y = (t.detach().cpu() for t in (call.operands["x"], call.others["y"]))
    ref, _ = plain_attention(
        *(call.operands[name].detach().cpu().double() for name in ("query", "key", "value")),
        lambda s, b, h, q, k: s + (x[h] * y[q]).double() + x[b].double(), None)
    check(out, ref)
    (gradient,) = torch.autograd.grad(out.square().sum(), [call.operands["x"]])
    assert gradient.dtype == dtype and torch.isfinite(gradient).all() and gradient[0] != 0


def test_captured_tensors_of_any_strides_and_rank(device):
    """Transposed, expanded, sliced, of rank 0 and 5, bool and int64; a scalar from the CPU."""
    big = torch.arange(2 * 3 * 4, dtype=torch.int64, device=device).reshape(1, 2, 1, 3, 4)
    wide = torch.randn(70, 2, device=device).t()
    rows = torch.randn(70, 1, device=device).expand(70, 70)
    flags = poisoned(torch.arange(70) % 3 == 0, device)
    scalar = torch.tensor(0.5)

    def score_mod(s, b, h, q, k):
        s = s * scalar + wide[h, q] + rows[q, k] * 0.1 + big[b, h, 0, q % 3, k % 4] / 7
        return torch.where(flags[k], s + 1, s) + big[0, 1][b, 2][k % 4] / 9

    q, k, v = torch.randn(3, 1, 2, 70, 8, device=device)
    out = flex_attention(q, k, v, score_mod)
    big, wide, rows, flags = (x.cpu() for x in (big, wide, rows, flags))

    def same(s, b, h, q, k):
        s = s * 0.5 + wide.double()[h, q] + rows.double()[q, k] * 0.1
        s = s + big[b, h, torch.zeros_like(q), q % 3, k % 4] / 7.0
        return torch.where(flags[k], s + 1, s) + big[0, 1, 0, 2][k % 4] / 9.0

    reference = [x.cpu().double() for x in (q, k, v)]
    check(out, plain_attention(*reference, same, None)[0],
          plain_attention(*(x.float() for x in reference), same, None)[0].float())


def test_captured_scalars_alone(device):
    """No dimensions at all: one score_mod, one mask_mod, a scalar from the CPU among them."""
    gain, width = torch.tensor(0.5, device=device, requires_grad=True), torch.tensor(20)
    q, k, v = torch.randn(3, 1, 2, 40, 8, device=device)
    mask = create_block_mask(lambda b, h, qi, ki: qi + 3 > ki, None, None, 40, 40, device="mps")
    mask.mask_mod = lambda b, h, qi, ki: (qi - ki).abs() < width
    out = flex_attention(q, k, v, lambda s, b, h, qi, ki: s * gain, mask)
    leaf = gain.detach().cpu().double().requires_grad_()
    ref, _ = plain_attention(*(x.cpu().double() for x in (q, k, v)),
                             lambda s, b, h, qi, ki: s * leaf,
                             lambda b, h, qi, ki: (qi - ki).abs() < 20)
    check(out, ref)
    check(*(torch.autograd.grad(x[0, 0, :, 0].sum(), [one])[0]
            for x, one in ((out, gain), (ref, leaf))))


def test_indices_beyond_a_captured_tensor_read_its_ends(device, checked):
    """Negative ones count from the end, as in PyTorch; nothing outside of it is read."""
    table = poisoned(torch.tensor([1.0, 2.0, 4.0]), device)
    q = torch.zeros(1, 1, 1, 8, device=device)
    v = torch.eye(8, device=device)[None, None]
    for shift, expected in ((0, [1, 2, 4, 4, 4, 4, 4, 4]), (-2, [2, 4, 1, 2, 4, 4, 4, 4]),
                            (-6, [1, 1, 1, 1, 2, 4, 1, 2]), (2**40, [4] * 8)):
        out = flex_attention(q, v * 0, v, lambda s, b, h, qi, ki, n=shift: s + table[ki + n].log())
        check_exact(out.flatten() * sum(expected), torch.tensor(expected), 1e-5)


def test_keys_that_no_query_sees_never_contribute(device):
    """Hidden by the mask, by blocks that are left out, or by a score of -inf; in decode too."""
    def attend(seqlen_q, poison):
        torch.manual_seed(0)
        q = torch.randn(1, 2, seqlen_q, 8, device=device, requires_grad=poison is not None)
        k, v = torch.randn(2, 1, 2, 90, 8).unbind()
        hidden = [5, 70, 71]
        for x in (k, v):
            x[:, :, hidden] = float("nan") if poison else 0.0
        k, v = (x.to(device).requires_grad_(q.requires_grad) for x in (k, v))
        mask = create_block_mask(lambda b, h, qi, ki: (ki != 5) & (ki < 80), 1, 1, seqlen_q, 90,
                                 device="mps", BLOCK_SIZE=32)
        out = flex_attention(q, k, v, lambda s, b, h, qi, ki: torch.where(
            (ki == 70) | (ki == 71), -float("inf"), s), mask)
        return out, (q, k, v)

    for seqlen_q in (40, 1):
        out, inputs = attend(seqlen_q, True)
        clean, clean_inputs = attend(seqlen_q, False)
        check_same_bits(out, clean)
        for got, expected in zip(torch.autograd.grad(out.sum(), inputs),
                                 torch.autograd.grad(clean.sum(), clean_inputs), strict=True):
            check_same_bits(got, expected)


def test_queries_that_see_no_key(device):
    q, k, v = (torch.randn(1, 1, 40, 8, device=device, requires_grad=True) for _ in range(3))
    mask = create_block_mask(lambda b, h, qi, ki: qi >= 4, 1, 1, 40, 40, device="mps",
                             BLOCK_SIZE=32)
    out, lse = flex_attention(q, k, v, None, mask, return_lse=True)
    assert (out[:, :, :4] == 0).all() and (lse[:, :, :4] == -torch.inf).all()
    assert torch.isfinite(lse[:, :, 4:]).all()
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert torch.isfinite(gradient).all()


def test_without_functions_it_is_attention(device):
    q, k, v = torch.randn(3, 2, 2, 33, 8, device=device)
    check_same_bits(flex_attention(q, k, v), torch_flash_mps.attention(q, k, v))


def test_new_lengths_and_values_build_no_pipeline(device, simulator):
    table = torch.randn(2, 7, device=device)

    def run(seqlen):
        q, k, v = torch.randn(3, 1, 2, seqlen, 8, device=device).requires_grad_()
        mask = create_block_mask(causal, 1, 1, seqlen, seqlen, device="mps", BLOCK_SIZE=32)
        flex_attention(q, k, v, score_mod, mask).sum().backward()

    def score_mod(s, b, h, q, k):
        return s + table[h, (q - k) % 7]

    def causal(b, h, q, k):
        return q >= k

    run(33)
    pipelines = simulator.stats()["pipelines_built"] if simulator else 0
    table.fill_(0.5)
    for seqlen in (40, 65, 100):
        table = torch.randn(2, seqlen, device=device)
        run(seqlen)
    if simulator:
        assert simulator.stats()["pipelines_built"] == pipelines


def test_memory_holds_no_score_matrix(device):
    """What is allocated from forward to backward is linear in the sequence length."""
    q, k, v = torch.randn(3, 1, 1, 512, 8, device=device).requires_grad_().unbind()
    mask = create_block_mask(lambda b, h, qi, ki: qi >= ki, 1, 1, 512, 512, device="mps",
                             BLOCK_SIZE=128)
    before = torch.mps.current_allocated_memory()
    out = flex_attention(q, k, v, None, mask)
    assert torch.mps.current_allocated_memory() - before < 512 * 512
    out.sum().backward()


def test_torch_compile_runs_it_between_its_graphs(device):
    q, k, v = torch.randn(3, 1, 2, 33, 8, device=device)
    slopes = torch.rand(2, device=device)

    def model(q, k, v):
        return flex_attention(q * 2, k, v, lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()) + 1

    expected = model(q, k, v)
    with pytest.raises(Exception, match="traces its functions itself"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(q, k, v)
    check_same_bits(torch.compile(model, backend="aot_eager")(q, k, v), expected)


def test_under_autocast_and_func_grad(device):
    q, k, v = torch.randn(3, 1, 2, 33, 8, device=device)
    with torch.autocast("mps", dtype=torch.float16):
        out = flex_attention(q, k, v)
    check_same_bits(out, flex_attention(*(x.half() for x in (q, k, v))))
    gradient = torch.func.grad(lambda q: flex_attention(q, k, v).sum())(q)
    leaf = q.clone().requires_grad_()
    flex_attention(leaf, k, v).sum().backward()
    check_same_bits(gradient, leaf.grad)
