"""The op inside PyTorch's machinery: which gradients, autocast, checkpoints, hooks, transforms."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from cases import Case, make_inputs
from checks import check_exact, check_same_bits
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import torch_flash_mps

attention = torch.ops.flash_mps.attention


def leaves(place, *, dtype=torch.float32, seqlen=9):
    operands = make_inputs(Case(2, 2, 2, seqlen, seqlen, 16, dtype=dtype), place).operands
    return [x.detach().clone().requires_grad_() for x in operands]


def plain_gradients(operands):
    return torch.autograd.grad(attention(*operands).sum(), operands)


def dispatched(function, *arguments):
    """Names of the attention ops that a call runs."""
    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "flash_mps":
                self.names.append((func._opname, (kwargs or {}).get("output_mask")))
            return func(*args, **(kwargs or {}))

    with Recorder() as recorder:
        function(*arguments)
    return recorder.names


def test_BW_14_lse_is_computed_only_for_a_gradient(place):
    q, k, v = leaves(place)
    assert dispatched(attention, q.detach(), k.detach(), v.detach()) == [("attention", None)]
    with torch.no_grad():
        assert dispatched(attention, q, k, v) == [("attention", None)]
    assert dispatched(attention, q, k.detach(), v.detach()) == [("attention_with_lse", None)]


def test_BW_14_only_the_gradients_asked_for_are_computed(place):
    everything = plain_gradients(leaves(place))
    for index in range(3):
        operands = leaves(place)
        for other in (0, 1, 2):
            operands[other].requires_grad_(other == index)
        calls = dispatched(lambda x=operands: attention(*x).sum().backward())
        wanted = [i == index for i in range(3)]
        backward = ("attention_backward", [*wanted, False, False])
        assert calls == [("attention_with_lse", None), backward]
        assert [x.grad is not None for x in operands] == wanted
        check_same_bits(operands[index].grad, everything[index])
    operands = leaves(place)
    calls = dispatched(lambda: torch.autograd.grad(attention(*operands).sum(), operands[1]))
    assert calls[1] == ("attention_backward", [False, True, False, False, False])


@pytest.mark.parametrize("seqlen", [9, 20])
def test_BW_14_every_mode_agrees(place, seqlen):
    """In the same bits, but for up to 16 queries, which run another kernel without a gradient."""
    mask = torch.ones(2, 1, seqlen, seqlen, dtype=torch.bool, device=place)
    mask[0, :, 3] = False
    mask[1, :, :, 5:] = False
    q, k, v = leaves(place, seqlen=seqlen)
    with_gradient = attention(q, k, v, mask)
    assert with_gradient.requires_grad and not with_gradient.isnan().any()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = attention(q, k, v, mask)
            assert not out.requires_grad
            check_exact(out, with_gradient.detach(), 1e-6 if seqlen <= 16 else 0.0)


def test_a_bool_mask_gets_no_gradient_and_a_float_mask_does(place):
    q, k, v = (x.detach() for x in leaves(place))
    assert not attention(q, k, v, torch.ones(9, 9, dtype=torch.bool, device=place)).requires_grad
    mask = torch.zeros(9, 9, device=place, requires_grad=True)
    attention(q, k, v, mask).square().sum().backward()
    assert mask.grad.shape == mask.shape and mask.grad.abs().max() > 0


def test_unused_outputs_and_undefined_gradients(place):
    q, k, v = leaves(place)
    out, lse = torch_flash_mps.attention(q, k, v, return_lse=True)
    assert out.requires_grad and lse.requires_grad
    expected = plain_gradients([q, k, v])
    for got, wanted in zip(torch.autograd.grad(out.sum(), [q, k, v], retain_graph=True), expected,
                           strict=True):
        check_same_bits(got, wanted)
    by_lse = torch.autograd.grad(lse.sum(), [q, k, v])
    check_exact(by_lse[2], 0.0)
    assert by_lse[0].abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_PY_08_autocast(place, dtype, backward_inside):
    q, k, v = leaves(place)
    v = v.detach().half().requires_grad_()
    mask = torch.randn(9, 9, device=place).requires_grad_()
    with torch.autocast(place.type, dtype):
        out, lse = torch_flash_mps.attention(q, k, v, attn_mask=mask, return_lse=True)
        assert F.scaled_dot_product_attention(q, k, v, mask).dtype == dtype
        alone = attention(q, k, v, mask)
        if backward_inside:
            out.sum().backward()
    assert out.dtype == alone.dtype == dtype and lse.dtype == torch.float32
    if not backward_inside:
        out.sum().backward()
    for leaf in (q, k, v, mask):
        assert leaf.grad.dtype == leaf.dtype
    cast = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    check_same_bits(out, attention(*cast, mask))
    for leaf, gradient in zip((q, k, v), torch.autograd.grad(attention(*cast, mask).sum(), cast),
                              strict=True):
        check_same_bits(leaf.grad, gradient.to(leaf.dtype))


def test_PY_08_a_large_negative_mask_stays_finite_under_autocast(place):
    q, k, v = (x.detach() for x in leaves(place))
    mask = torch.full((9, 9), torch.finfo(torch.float32).min, device=place)
    with torch.autocast(place.type, torch.float16):
        out = attention(q, k, v, mask)
    check_exact(out, v.mean(2, keepdim=True).cpu().expand(out.shape), 2e-3)


def test_PY_08_autocast_for_another_device_changes_nothing(place):
    other = "cpu" if place.type == "mps" else "mps"
    with torch.autocast(other, torch.float16):
        assert attention(*leaves(place)).dtype == torch.float32


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_PY_10_checkpointing(place, use_reentrant):
    operands = leaves(place)
    expected = plain_gradients(operands)
    checkpoint(attention, *operands, use_reentrant=use_reentrant).sum().backward()
    for leaf, gradient in zip(operands, expected, strict=True):
        check_same_bits(leaf.grad, gradient)


def test_PY_10_saved_tensor_hooks(place):
    operands = leaves(place)
    expected = plain_gradients(operands)
    packed = []

    def pack(x):
        packed.append(x.shape)
        return x.detach().cpu()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x.to(place)):
        out = attention(*operands)
    assert len(packed) == 5   # query, key, value, out and lse
    for got, wanted in zip(torch.autograd.grad(out.sum(), operands), expected, strict=True):
        check_same_bits(got, wanted)


def test_PY_10_backward_twice(place):
    operands = leaves(place)
    out = attention(*operands)
    first = torch.autograd.grad(out.sum(), operands, retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(out.sum(), operands), strict=True):
        check_same_bits(one, other)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.sum(), operands)


def test_PY_10_one_tensor_as_all_three(place):
    x = leaves(place)[0]
    parts = plain_gradients([x.detach().clone().requires_grad_() for _ in range(3)])
    attention(x, x, x).sum().backward()
    check_exact(x.grad, sum(part.cpu() for part in parts), 1e-6)


@pytest.mark.parametrize("return_lse", [False, True])
def test_a_graph_that_nobody_uses_is_freed(place, return_lse):
    operands = [x * 1 for x in leaves(place)]
    alive = [weakref.ref(x) for x in operands]
    results = torch_flash_mps.attention(*operands, return_lse=return_lse)
    del operands
    assert all(x() is not None for x in alive)
    gc.disable()
    try:
        del results
        assert [x() for x in alive] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize("index", range(4))
def test_an_operand_that_changed_since_is_an_error(place, index):
    operands = [x * 1 for x in leaves(place)]
    out = attention(*operands)
    (*operands, out)[index].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_BW_13_double_backward_is_an_error(place):
    q, k, v = leaves(place)
    gradient, = torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)
    check_same_bits(gradient, plain_gradients([q, k, v])[0])
    with pytest.raises(RuntimeError, match="flash_mps::attention.*double backward.*MATH"):
        gradient.square().sum().backward()


def test_BW_13_forward_mode_is_an_error(place):
    operands = tuple(x.detach() for x in leaves(place))
    named = "flash_mps::attention: forward-mode.*MATH"
    with pytest.raises(NotImplementedError, match=named):
        torch.func.jvp(attention, operands, operands)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=named):
        attention(operands[0], operands[1], forward_ad.make_dual(operands[2], operands[2]))


def test_BW_13_the_way_round_works(place):
    q, k, v = leaves(place)
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(q, k, v)
        gradient, = torch.autograd.grad(out.sum(), q, create_graph=True)
        gradient.square().sum().backward()
    assert q.grad.abs().max() > 0
    with sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
        dual = F.scaled_dot_product_attention(forward_ad.make_dual(q, q), k, v)
        assert forward_ad.unpack_dual(dual).tangent.abs().max() > 0


def test_function_transforms(place):
    operands = [x.detach() for x in leaves(place, seqlen=20)]
    expected = plain_gradients([x.requires_grad_() for x in leaves(place, seqlen=20)])
    got = torch.func.grad(lambda *x: attention(*x).sum(), argnums=(0, 1, 2))(*operands)
    for one, other in zip(got, expected, strict=True):
        check_same_bits(one, other)
    out, pull_back = torch.func.vjp(attention, *operands)
    for one, other in zip(pull_back(torch.ones_like(out)), expected, strict=True):
        check_same_bits(one, other)


VMAPS = {
    "rank-4": ((3, 2, 4, 9, 8), (3, 2, 2, 5, 8), (3, 2, 2, 5, 6), (0, 0, 0)),
    "rank-3": ((3, 4, 9, 8), (3, 4, 5, 8), (3, 4, 5, 8), (0, 0, 0)),
    "rank-3-broadcast": ((3, 1, 9, 8), (3, 4, 5, 8), (3, 4, 5, 8), (0, 0, 0)),
    "rank-2": ((3, 9, 8), (3, 5, 8), (3, 5, 8), (0, 0, 0)),
    "query-only": ((3, 2, 4, 9, 8), (2, 4, 5, 8), (2, 4, 5, 8), (0, None, None)),
    "value-only": ((2, 4, 9, 8), (2, 4, 5, 8), (2, 4, 5, 3, 8), (None, None, 3)),
    "other-dims": ((2, 3, 4, 9, 8), (2, 4, 5, 3, 8), (2, 4, 5, 8, 3), (1, -2, -1)),
    "ranks-differ": ((3, 4, 9, 8), (3, 2, 4, 5, 8), (3, 2, 4, 5, 8), (0, 0, 0)),
}


@pytest.mark.parametrize("masked", [None, "shared", "mapped"])
@pytest.mark.parametrize("name", VMAPS)
def test_BW_13_vmap_is_one_call(place, name, masked):
    *shapes, dims = VMAPS[name]
    operands = [torch.randn(shape).to(place) for shape in shapes]
    mask = torch.randn(*([3] if masked == "mapped" else []), 9, 5).to(place) if masked else None
    arguments, dims = (*operands, mask), (*dims, 0 if masked == "mapped" else None)

    def attend(q, k, v, mask):
        return torch_flash_mps.attention(q, k, v, attn_mask=mask, enable_gqa=True, return_lse=True)

    def loss(*arguments):
        out, lse = attend(*arguments)
        return out.square().sum() + lse.sum()

    wanted = range(4 if masked else 3)
    both = {"forward": attend, "backward": torch.func.grad(loss, argnums=tuple(wanted))}
    for direction, function in both.items():
        mapped = torch.vmap(function, in_dims=dims)
        samples = [function(*(x if dim is None else x.select(dim, i)
                              for x, dim in zip(arguments, dims, strict=True))) for i in range(3)]
        for got, parts in zip(mapped(*arguments), zip(*samples, strict=True), strict=True):
            check_exact(got, torch.stack(parts), 2e-5, case_id=direction)
        assert len(dispatched(mapped, *arguments)) == (1 if direction == "forward" else 2)


def test_vmap_in_vmap(place):
    q, k, v = (torch.randn(2, 3, 4, 5, 8).to(place) for _ in range(3))
    twice = torch.vmap(torch.vmap(attention))
    check_exact(twice(q, k, v), attention(q, k, v), 1e-6)
    assert len(dispatched(twice, q, k, v)) == 1
