"""Operators on the simulated `mps` device: every result and gradient is the CPU operator's."""

import sys

import pytest
import torch
import torch.nn.functional as F
from mps_compare import assert_same, on
from torch.utils._pytree import tree_flatten

if sys.platform == "darwin":
    pytest.skip("these tests are about the simulated device", allow_module_level=True)

RANDOM_INPUT = torch.Generator().manual_seed(0)


def dense(*shape):
    return torch.randn(shape, generator=RANDOM_INPUT)


def view(*shape):
    """Neither contiguous nor at the start of its storage."""
    return dense(3, *shape, 2)[1, ..., 1]


def positive(*shape):
    return view(*shape).abs() + 0.5


def index(size, *shape):
    return torch.randint(size, shape, generator=RANDOM_INPUT)


OPERATORS = {
    "add": (lambda x, y: x + y, view(3, 4), view(3, 4)),
    "add-broadcast": (lambda x, y: x + y, view(3, 4), view(4)),
    "add-number": (lambda x: x + 1.5, view(3, 4)),
    "add-0-dim-cpu": (lambda x: x + torch.tensor(2.5), view(3, 4)),
    "sub-half": (lambda x, y: x.half() - y.half(), view(3, 4), view(3, 4)),
    "mul-bfloat16": (lambda x, y: x.bfloat16() * y.bfloat16(), view(3, 4), view(3, 4)),
    "div-promotes": (lambda x, y: (x, y + 1), view(3, 4), index(5, 3, 4)),
    "pow": (lambda x: x.pow(2.5), positive(3, 4)),
    "exp-log": (lambda x: x.log().exp(), positive(3, 4)),
    "erf": (lambda x: x.erf(), view(3, 4)),
    "clamp": (lambda x: x.clamp(-0.5, 0.5), view(3, 4)),
    "where": (lambda x, y: torch.where(x > 0, x, y), view(3, 4), view(3, 4)),
    "where-number": (lambda x: torch.where(x > 0, x, 0.0), view(3, 4)),
    "masked-fill": (lambda x: x.masked_fill(x > 0, float("-inf")), view(3, 4)),
    "masked-select": (lambda x: x[x > 0], view(3, 4)),
    "sum": (lambda x: x.sum(0, keepdim=True), view(3, 4)),
    "mean": (lambda x: x.mean(), view(3, 4)),
    "var-mean": (lambda x: torch.var_mean(x, 1), view(3, 4)),
    "max-dim": (lambda x: tuple(x.max(1)), view(3, 4)),
    "amax": (lambda x: x.amax(0), view(3, 4)),
    "argmax": (lambda x: x.argmax(1), view(3, 4)),
    "logsumexp": (lambda x: x.logsumexp(1), view(3, 4)),
    "norm": (lambda x: torch.linalg.vector_norm(x, dim=1), view(3, 4)),
    "cumsum": (lambda x: x.cumsum(1), view(3, 4)),
    "sort": (lambda x: tuple(x.sort(1)), view(3, 4)),
    "topk": (lambda x: tuple(x.topk(3)), view(3, 8)),
    "unique": (lambda x: x.unique(), index(4, 20)),
    "nonzero": (lambda x: (x > 0).nonzero(), view(3, 4)),
    "cat": (lambda x, y: torch.cat([x, y]), view(3, 4), view(2, 4)),
    "stack": (lambda x, y: torch.stack([x, y], 1), view(3, 4), view(3, 4)),
    "chunk": (lambda x: x.chunk(2, 1), view(3, 4)),
    "repeat": (lambda x: x.repeat(2, 1), view(3, 4)),
    "repeat-interleave": (lambda x: x.repeat_interleave(2, 1), view(3, 4)),
    "roll": (lambda x: x.roll(1, 0), view(3, 4)),
    "flip": (lambda x: x.flip(1), view(3, 4)),
    "tril": (lambda x: x.tril(), view(4, 4)),
    "pad": (lambda x: F.pad(x, (1, 2)), view(3, 4)),
    "gather": (lambda x, i: x.gather(1, i), view(3, 4), index(4, 3, 2)),
    "scatter": (lambda x, i: x.scatter(1, i, 0.5), view(3, 4), index(4, 3, 2)),
    "index-select": (lambda x, i: x.index_select(0, i), view(3, 4), index(3, 5)),
    "index": (lambda x, i: x[i, 1], view(3, 4), index(3, 5)),
    "index-by-cpu-tensor": (lambda x: x[torch.tensor([2, 0])], view(3, 4)),
    "mm": (lambda x, y: x @ y, view(3, 4), view(4, 5)),
    "mm-transposed": (lambda x, y: x @ y.t(), view(3, 4), view(5, 4)),
    "bmm": (lambda x, y: x @ y, view(2, 3, 4), view(2, 4, 5)),
    "addmm": (lambda x, y, z: torch.addmm(x, y, z), view(5), view(3, 4), view(4, 5)),
    "einsum": (lambda x, y: torch.einsum("bqd,bkd->bqk", x, y), view(2, 3, 4), view(2, 5, 4)),
    "linear": (lambda x, w, b: F.linear(x, w, b), view(2, 3, 4), view(5, 4), view(5)),
    "softmax": (lambda x: x.softmax(1), view(3, 4)),
    "softmax-half-in-float": (lambda x: x.half().softmax(1, dtype=torch.float32), view(3, 4)),
    "log-softmax": (lambda x: x.log_softmax(1), view(3, 4)),
    "gelu": (lambda x: F.gelu(x, approximate="tanh"), view(3, 4)),
    "silu": (lambda x: F.silu(x), view(3, 4)),
    "layer-norm": (lambda x, w, b: F.layer_norm(x, (8,), w, b), view(3, 8), view(8), view(8)),
    "rms-norm": (lambda x, w: F.rms_norm(x, (8,), w), view(3, 8), view(8)),
    "group-norm": (lambda x: F.group_norm(x, 2), view(2, 4, 3)),
    "batch-norm": (lambda x: F.batch_norm(x, None, None, training=True), view(4, 3)),
    "embedding": (lambda w, i: F.embedding(i, w), view(6, 4), index(6, 2, 3)),
    "conv1d": (lambda x, w: F.conv1d(x, w, padding=1), view(2, 3, 8), view(4, 3, 3)),
    "conv2d": (lambda x, w: F.conv2d(x, w, stride=2), view(2, 3, 6, 6), view(4, 3, 3, 3)),
    "conv-transpose": (lambda x, w: F.conv_transpose1d(x, w), view(2, 3, 4), view(3, 2, 3)),
    "max-pool": (lambda x: F.max_pool2d(x, 2), view(2, 3, 6, 6)),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), view(1, 2, 4, 4)),
    "cross-entropy": (lambda x, i: F.cross_entropy(x, i), view(3, 5), index(5, 3)),
    "mse": (lambda x, y: F.mse_loss(x, y), view(3, 5), view(3, 5)),
    "svd-values": (lambda x: torch.linalg.svdvals(x), view(4, 3)),
    "solve": (lambda x, y: torch.linalg.solve(x, y).contiguous(), view(3, 3), view(3, 2)),
    "fft": (lambda x: torch.view_as_real(torch.fft.rfft(x)), view(8)),
    "complex": (lambda x, y: torch.view_as_real(torch.complex(x, y).conj() * 2),
                view(3, 4), view(3, 4)),
    "to-dtype": (lambda x: (x.to(torch.int32), x.to(torch.bool), x.bfloat16()), view(3, 4)),
    "clone-channels-last": (lambda x: x.clone(memory_format=torch.channels_last), view(1, 3, 4, 4)),
    "expand": (lambda x: x.expand(2, 3, 4), view(3, 1)),
    "arange-like": (lambda x: torch.arange(5, device=x.device) + x, view(5)),
    "new-full": (lambda x: x.new_full((2, 2), 3.5), view(5)),
    "empty-size": (lambda x, y: (x @ y, x.sum(), torch.cat([x, x])), dense(0, 4), dense(4, 3)),
    "sdpa": (lambda q, k: F.scaled_dot_product_attention(q, k, k),
             view(1, 2, 5, 8), view(1, 2, 7, 8)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_and_gradient_equal_the_cpus(device, name):
    function, *inputs = OPERATORS[name]
    inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    moved = on(device, inputs)
    expected, got = function(*inputs), function(*moved)
    assert_same(got, expected)
    if any(out.requires_grad for out in tree_flatten(expected)[0]):
        for outs in (expected, got):
            leaves = [out for out in tree_flatten(outs)[0] if out.requires_grad]
            sum(leaf.float().square().sum() for leaf in leaves).backward()
        assert_same([x.grad for x in moved if x.requires_grad],
                    [x.grad for x in inputs if x.requires_grad])


IN_PLACE = {
    "add_": lambda x: x.add_(1),
    "mul_": lambda x: x.mul_(x),
    "masked_fill_": lambda x: x.masked_fill_(x > 0, 0),
    "index_put_": lambda x: x.index_put_((torch.tensor([0, 2], device=x.device),),
                                         torch.tensor(7.0, device=x.device)),
    "setitem": lambda x: x.__setitem__((slice(None), 1), 5.0),
    "copy_": lambda x: x.copy_(torch.arange(4, device=x.device)),
    "copy_-from-cpu": lambda x: x.copy_(torch.arange(4)),
    "zero_": lambda x: x.zero_(),
    "fill_": lambda x: x.fill_(3),
    "t_": lambda x: x.t_(),
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "foreach": lambda x: torch._foreach_add_([x, x], 1.0),
    "scatter_add_": lambda x: x.scatter_add_(1, (x[:, :1] > 0).long(), x[:, 1:2] * 1),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_writes_the_view_and_nothing_beside_it(device, name):
    whole = torch.randn(5, 6)
    moved = whole.to(device)
    part, moved_part = whole[1:4, 1:5], moved[1:4, 1:5]
    IN_PLACE[name](part)
    IN_PLACE[name](moved_part)
    assert_same(moved, whole)
    assert_same(moved_part, part)


VIEWS = {
    "view": lambda x: x.view(6, 4),
    "reshape": lambda x: x.reshape(24),
    "select": lambda x: x[1],
    "slice": lambda x: x[:, 1:],
    "transpose": lambda x: x.transpose(0, 2),
    "permute": lambda x: x.permute(2, 0, 1),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "diagonal": lambda x: x.diagonal(),
    "unfold": lambda x: x.unfold(2, 2, 1),
    "expand": lambda x: x[:, :1].expand(2, 3, 4),
    "narrow": lambda x: x.narrow(2, 1, 2),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 2), 3),
    "detach": lambda x: x.detach(),
    "view-dtype": lambda x: x.view(torch.int32),
    "view_as_complex": lambda x: torch.view_as_complex(x.view(2, 3, 2, 2)),
    "view_as_real": lambda x: torch.view_as_real(torch.view_as_complex(x.view(2, 3, 2, 2))),
    "split": lambda x: x.split(1)[1],
    "unbind": lambda x: x.unbind(1)[2],
    "movedim": lambda x: x.movedim(0, 1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_view_shares_memory(device, name):
    base = torch.arange(24.0, device=device).reshape(2, 3, 4)
    seen = VIEWS[name](base)
    expected = VIEWS[name](torch.arange(24.0).reshape(2, 3, 4))
    assert seen.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    assert seen.storage_offset() == expected.storage_offset()
    assert_same(seen, expected)
    base.zero_()
    assert not torch.view_as_real(seen).any() if seen.is_complex() else not seen.any()


OUT = {
    "add": lambda x, out: torch.add(x, 1, out=out),
    "cat": lambda x, out: torch.cat([x, x], out=out),
    "matmul": lambda x, out: torch.matmul(x, x.t(), out=out),
    "cumsum": lambda x, out: torch.cumsum(x, 0, out=out),
    "index_select": lambda x, out: torch.index_select(
        x, 0, torch.tensor([1, 0, 1, 2], device=x.device), out=out),
    "masked_select": lambda x, out: torch.masked_select(x, x > 0, out=out),
}


@pytest.mark.parametrize("name", OUT)
def test_out_argument_grows_to_the_result(device, name):
    x = torch.randn(3, 4)
    expected, out = torch.empty(0), torch.empty(0, device=device)
    OUT[name](x, expected)
    assert OUT[name](x.to(device), out) is out
    assert_same(out, expected)
    assert out.untyped_storage().nbytes() >= out.numel() * 4


MIXED = {
    "add": lambda x, y: x + y,
    "mm": lambda x, y: x @ y,
    "linear": lambda x, y: F.linear(x, y),
    "embedding": lambda x, y: F.embedding(y.long(), x),
    "layer-norm": lambda x, y: F.layer_norm(x, (3,), y[0]),
    "cat": lambda x, y: torch.cat([x, y]),
    "index-select": lambda x, y: x.index_select(0, y[0].long()),
    "where": lambda x, y: torch.where(y > 0, x, x),
    "conv": lambda x, y: F.conv1d(x[None], y[None]),
    "foreach": lambda x, y: torch._foreach_add([x], [y]),
    "in-place": lambda x, y: y.add_(x),
    "in-place-number": lambda x, y: torch.tensor(1.0).add_(x[0, 0]),
    "out": lambda x, y: torch.add(x, 1, out=y),
    "sort-out": lambda x, y: torch.sort(x, out=(y, y.long())),
}


@pytest.mark.parametrize("name", MIXED)
def test_tensors_of_two_devices_are_refused(device, name):
    with pytest.raises(RuntimeError, match="same device"):
        MIXED[name](torch.ones(3, 3, device=device), torch.ones(3, 3))


def test_sdpa_refuses_tensors_of_two_devices(device):
    q, k = torch.ones(1, 2, 3, 4, device=device), torch.ones(1, 2, 3, 4)
    with pytest.raises(RuntimeError, match="same device"):
        F.scaled_dot_product_attention(q, k, k)
