"""The functions of the flash_attn package: its layout, alignment, signatures; errors by name."""

import inspect
import math
import sys

import pytest
import torch
from cases import DTYPE_NAMES, DTYPES, ramp
from checks import check, check_exact, check_same_bits
from kv_model import Addressing, angles, empty_cache
from torch._dynamo.testing import CompileCounterWithBackend

import torch_flash_mps
from torch_flash_mps import flash_attn
from torch_flash_mps.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_with_kvcache,
)
from torch_flash_mps.reference import attention_ref

OPTIONS = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic " \
          "return_attn_probs"
SIGNATURES = {
    "flash_attn_func": f"q k v {OPTIONS}",
    "flash_attn_kvpacked_func": f"q kv {OPTIONS}",
    "flash_attn_qkvpacked_func": f"qkv {OPTIONS}",
    "flash_attn_varlen_func":
        f"q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k {OPTIONS} block_table",
    "flash_attn_varlen_kvpacked_func":
        f"q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k {OPTIONS}",
    "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {OPTIONS}",
    "flash_attn_with_kvcache":
        "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad "
        "block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes "
        "num_splits return_softmax_lse",
}
DEFAULTS = {"dropout_p": 0.0, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
            "deterministic": False, "return_attn_probs": False, "rotary_interleaved": True,
            "num_splits": 0, "return_softmax_lse": False}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_that_of_the_package(name):
    parameters = inspect.signature(getattr(flash_attn, name)).parameters
    positional = [x for x in parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
    assert [x.name for x in positional] == SIGNATURES[name].split()
    for x in positional:
        if x.default is not x.empty:
            assert x.default == DEFAULTS.get(x.name)
    assert set(flash_attn.__all__) == {*SIGNATURES, "install", "uninstall"}


def random_operands(place, seqlen_q=7, seqlen_k=11, heads=(6, 2), dtype=torch.float32):
    shapes = ((2, seqlen_q, heads[0], 24), *((2, seqlen_k, heads[1], 24),) * 2)
    return [torch.randn(shape).to(dtype).to(place) for shape in shapes]


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES.get)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlens", [(7, 11), (11, 7), (20, 20)], ids=str)
def test_PY_05_the_layout_is_bshd(place, dtype, causal, seqlens):
    q, k, v = random_operands(place, *seqlens, dtype=dtype)
    out, lse, s_dmask = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    ref, ref_lse = attention_ref(*heads_first, is_causal=causal,
                                 causal_offset=seqlens[1] - seqlens[0])
    lowp, _ = attention_ref(*heads_first, is_causal=causal, dtype=dtype,
                            causal_offset=seqlens[1] - seqlens[0])
    assert out.shape == q.shape and out.is_contiguous() and s_dmask.numel() == 0
    check(out, ref.transpose(1, 2), lowp.transpose(1, 2))
    check_exact(lse, ref_lse, 2e-5)
    check_same_bits(flash_attn_func(q, k, v, causal=causal), out)
    if not causal:
        same = torch_flash_mps.attention(*heads_first, enable_gqa=True)
        check_same_bits(same.transpose(1, 2), out)


def test_PY_05_the_other_layout_is_an_error_that_says_so(place):
    heads_first = [x.transpose(1, 2) for x in random_operands(place, 8, 82, (8, 8))]
    with pytest.raises(ValueError, match=r"82, 82 and 8 .*\[batch, seqlen, num_heads, head_dim\]"):
        flash_attn_func(*heads_first)
    with pytest.raises(ValueError, match=r"torch_flash_mps.attention takes \[batch, num_heads"):
        flash_attn_with_kvcache(*heads_first)
    with pytest.raises(ValueError, match=r"flash_attn_func: expected k of rank 4, got shape \(2,"):
        flash_attn_func(heads_first[0], heads_first[1][:, 0], heads_first[2])


def test_PY_06_heads(place):
    q, k, v = random_operands(place, heads=(4, 2))
    repeated = [x.repeat_interleave(2, dim=2) for x in (k, v)]
    check_exact(flash_attn_func(q, k, v), flash_attn_func(q, *repeated), 1e-6)
    with pytest.raises(ValueError, match="a multiple of them in q, got 4, 4 and 6"):
        flash_attn_func(*random_operands(place, heads=(6, 4)))
    with pytest.raises(ValueError, match="as many heads in k as in v, .* got 2, 4 and 4"):
        flash_attn_func(q, k, repeated[1])
    with pytest.raises(ValueError, match="as many heads in k as in v, .* got 0, 0 and 4"):
        flash_attn_func(q, k[:, :, :0], v[:, :, :0])


def test_PY_04_lse_is_the_natural_logarithm(place):
    q, k, v = (x.transpose(1, 2).to(place) for x in ramp(1, 8))
    _, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    assert lse.shape == (1, 1, 1) and lse.dtype == torch.float32
    check_exact(lse, math.log(8), 1e-6)
    _, lse = flash_attn_with_kvcache(q, k, v, return_softmax_lse=True)
    check_exact(lse, math.log(8), 1e-6)
    parts = [flash_attn_func(q, k[:, :count], torch.full_like(v[:, :count], value),
                             return_attn_probs=True) for count, value in ((2, 1.0), (6, 5.0))]
    (out_a, lse_a, _), (out_b, lse_b, _) = parts
    merged, _ = torch_flash_mps.merge_states(out_a.transpose(1, 2), lse_a, out_b.transpose(1, 2),
                                             lse_b)
    check_exact(merged, 4.0, 1e-6)
    _, lse, _ = flash_attn_func(q.expand(1, 3, 1, 8), k[:, :1], v[:, :1], causal=True,
                                return_attn_probs=True)
    check_exact(lse, torch.tensor([[[-torch.inf, -torch.inf, 0.0]]]))


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "means"),
    [(3, 8, [2.5, 3, 3.5]), (1, 8, [3.5]), (2, 5, [1.5, 2]), (8, 3, [0, 0, 0, 0, 0, 0, 0.5, 1])],
)
def test_PY_03_DE_06_causal_is_bottom_right(place, seqlen_q, seqlen_k, means):
    q, k, v = (x.transpose(1, 2).to(place) for x in ramp(seqlen_q, seqlen_k))
    expected = torch.tensor(means, dtype=torch.float64)
    check_exact(flash_attn_func(q, k, v, causal=True)[0, :, 0, 0], expected, 1e-6)
    packed = flash_attn_kvpacked_func(q, torch.stack((k, v), 2), causal=True)
    check_exact(packed[0, :, 0, 0], expected, 1e-6)
    cached = flash_attn_with_kvcache(q, k, v, causal=True)
    check_exact(cached[0, :, 0, 0], expected, 1e-6)
    # The op itself is top-left, as F.scaled_dot_product_attention.
    top_left = torch_flash_mps.attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    check_exact(top_left[0, 0, :, 0], torch.tensor([min(i, seqlen_k - 1) / 2
                                                    for i in range(seqlen_q)]), 1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients(place, causal):
    """Packed or not, the same gradients; a query that sees no key has none."""
    operands = [x.cpu() for x in random_operands(place, 11, 7, (2, 2))]
    grad_out = torch.randn(2, 11, 2, 24)
    leaves = [x.double().requires_grad_() for x in operands]
    ref, _ = attention_ref(*(x.transpose(1, 2) for x in leaves), is_causal=causal,
                           causal_offset=7 - 11)
    expected = torch.autograd.grad(ref.transpose(1, 2), leaves, grad_out.double())

    def gradients(function, *inputs):
        inputs = [x.to(place).requires_grad_() for x in inputs]
        return torch.autograd.grad(function(*inputs, causal=causal), inputs, grad_out.to(place))

    for got, one in zip(gradients(flash_attn_func, *operands), expected, strict=True):
        check_exact(got, one, 2e-6)
    q, k, v = operands
    grad_q, grad_kv = gradients(flash_attn_kvpacked_func, q, torch.stack((k, v), 2))
    check_exact(grad_q, expected[0], 2e-6)
    check_exact(grad_kv, torch.stack(expected[1:], 2), 2e-6)
    if causal:
        assert not grad_q[:, :4].any() and grad_q[:, 4:].any()


def test_gradients_of_qkvpacked(place):
    qkv = torch.randn(2, 9, 3, 2, 16)
    leaf = qkv.double().requires_grad_()
    ref, _ = attention_ref(*leaf.transpose(1, 3).unbind(2), is_causal=True, scale=0.3)
    (expected,) = torch.autograd.grad(ref.sum(), leaf)
    packed = qkv.to(place).requires_grad_()
    out = flash_attn_qkvpacked_func(packed, softmax_scale=0.3, causal=True, deterministic=True)
    check_exact(out, ref.transpose(1, 2), 2e-6)
    (got,) = torch.autograd.grad(out.sum(), packed)
    check_exact(got, expected, 2e-6)


def test_PY_07_dropout(place):
    x = torch.ones(1, 5, 2, 8, device=place)
    for function, operands in ((flash_attn_func, (x, x, x)),
                               (flash_attn_kvpacked_func, (x, torch.stack((x, x), 2))),
                               (flash_attn_qkvpacked_func, (torch.stack((x, x, x), 2),))):
        assert torch.all(function(*operands, dropout_p=1.0) == 0)
        out = function(*operands, dropout_p=0.5)
        # Five equal weights of 1 / 5, each dropped or doubled.
        assert set((out * 2.5).round().flatten().tolist()) <= {0.0, 1.0, 2.0, 3.0, 4.0, 5.0}
        assert len(set(out.flatten().tolist())) > 1


def test_packed_operands_say_their_shape(place):
    x = torch.zeros(1, 5, 2, 2, 8, device=place)
    with pytest.raises(ValueError, match=r"expected qkv of shape \[batch, seqlen, 3, .* \(1, 5, 2"):
        flash_attn_qkvpacked_func(x)
    with pytest.raises(ValueError, match=r"expected kv of shape \[batch, seqlen, 2, .* \(1, 5, 3"):
        flash_attn_kvpacked_func(x[:, :, 0], torch.zeros(1, 5, 3, 2, 8, device=place))


def test_empty_sizes(place):
    q, cache = torch.ones(2, 3, 4, 8, device=place), torch.ones(2, 32, 2, 8, device=place)
    for sliced in (q[:0], q[:, :0]):
        batch = sliced.size(0)
        for out in (flash_attn_func(sliced, cache[:batch], cache[:batch], causal=True),
                    flash_attn_with_kvcache(sliced, cache[:batch], cache[:batch], causal=True)):
            assert out.shape == sliced.shape
    check_exact(flash_attn_func(q, cache[:, :0], cache[:, :0], causal=True), 0.0)
    new = torch.ones(2, 0, 2, 8, device=place)
    check_exact(flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=0), 0.0)


def test_vmap(place):
    q, k = torch.randn(3, 2, 5, 2, 8).to(place), torch.randn(3, 2, 9, 2, 8).to(place)
    got = torch.vmap(lambda q, k: flash_attn_func(q, k, k, causal=True))(q, k)
    check_exact(got, torch.stack([flash_attn_func(*x, x[1], causal=True)
                                  for x in zip(q, k, strict=True)]), 1e-6)


X = torch.ones(2, 1, 2, 8)
TABLES = dict(zip(("rotary_cos", "rotary_sin"), angles(64, 8), strict=True))
WRONG = {
    "v-alone": ({"k": None}, "both of k, v and both of rotary_cos, rotary_sin, or none"),
    "one-table": ({"rotary_cos": TABLES["rotary_cos"]}, "both of rotary_cos, rotary_sin, or none"),
    "tables-alone": (TABLES | {"k": None, "v": None}, "expected k and v with rotary_cos"),
    "no-length": ({"cache_seqlens": None}, "expected cache_seqlens with k and v, got none"),
    "batch": ({"k": X[:1], "v": X[:1]}, r"q with the batch and dtype of k .* k \(1, 1, 2, 8\)"),
    "dtype": ({"q": X.half()}, r"q with the batch and dtype of k .* torch.float16"),
    "head-dim": ({"q": torch.ones(2, 1, 2, 9)}, "head_dim of k_cache"),
    "k-heads": ({"k": X[:, :, :1], "v": X[:, :, :1]}, "head count of the cache, 2"),
    "k-rank": ({"k": X[0], "v": X[0]}, "expected k of rank 4"),
    "gradient": ({"q": X.clone().requires_grad_()}, "expected q without requires_grad"),
    "gradient-of-k": ({"k": X.clone().requires_grad_()}, "expected key without requires_grad"),
    "rows": ({"rotary_cos": TABLES["rotary_cos"][:5], "rotary_sin": TABLES["rotary_sin"][:5],
              "cache_seqlens": 5}, "at least 6 rows, got 5"),
    "float-lengths": ({"cache_seqlens": torch.zeros(2)}, "seqlens of dtype Int, got Float"),
    "lengths": ({"cache_seqlens": torch.zeros(3, dtype=torch.int32)}, r"seqlens of shape \[2\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_error_leaves_the_cache_as_it_was(place, name):
    options, said = WRONG[name]
    cache = empty_cache(2, 64, 2, 8, torch.float32)
    key, value = cache.key.clone().to(place), cache.value.clone().to(place)
    arguments = {"q": X, "k": X, "v": X, "cache_seqlens": 3} | options
    on_device = {name: x.detach().to(place).requires_grad_(x.requires_grad)
                 if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    with pytest.raises((ValueError, RuntimeError), match=said):
        flash_attn_with_kvcache(k_cache=key, v_cache=value, **on_device)
    check_same_bits(key, cache.key)
    check_same_bits(value, cache.value)


@pytest.mark.parametrize("kind", ["tensor", "int", "int8"])
def test_PY_09_a_new_length_compiles_nothing(place, kind):
    torch._dynamo.reset()
    count = CompileCounterWithBackend("inductor" if sys.platform == "darwin" else "aot_eager")
    tables = [x.to(place) for x in angles(64, 16)]

    def step(q, k, v, length, cache, *scales):
        named = dict(zip(("k_scale", "v_scale"), scales, strict=False))
        return flash_attn_with_kvcache(q, *cache, k, v, *tables, length, causal=True, **named)

    compiled = torch.compile(step, backend=count, fullgraph=True, dynamic=True)
    compiled_frames = set()
    for seqlen, length in ((7, 30), (3, 12), (5, 40)):
        cache = empty_cache(2, 64, 2, 16, torch.float32, is_int8=kind == "int8")
        cache.fill(Addressing([length, length]))
        tensors = [x for x in (cache.key, cache.value, cache.k_scale, cache.v_scale)
                   if x is not None]
        q, k, v = (torch.randn(2, seqlen, 2, 16).to(place) for _ in range(3))
        if kind != "int":
            length = torch.tensor([length, length], dtype=torch.int32).to(place)
        results = []
        for function in (step, compiled):
            own = [x.clone().to(place) for x in tensors]
            results.append((function(q, k, v, length, own[:2], *own[2:]), own))
        (out, own), (other, others) = results
        assert torch.isfinite(out).all()
        check_same_bits(other, out)
        for x, y in zip(own, others, strict=True):
            check_same_bits(x, y)
        compiled_frames.add(count.frame_count)
    assert len(compiled_frames) == 1
