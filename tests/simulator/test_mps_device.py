"""The simulated `mps` device as torch sees it: every result is that of PyTorch's CPU operator."""

import copy
import io
import pickle
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._pytree import tree_flatten, tree_map


@pytest.fixture(autouse=True)
def mps(device):
    """All of this file needs the device."""


def on(device, value):
    """A copy of `value` on `device` with the same strides, offset and position in its storage."""

    def move(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        base = torch.empty(0, dtype=leaf.dtype).set_(leaf.untyped_storage())
        moved = base.to(device).as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())
        return moved.detach().requires_grad_(leaf.requires_grad)

    return tree_map(move, value)


def assert_same(got, expected):
    """Same structure, strides and values; `got` on mps."""
    got_leaves, got_tree = tree_flatten(got)
    expected_leaves, expected_tree = tree_flatten(expected)
    assert got_tree == expected_tree
    for one, other in zip(got_leaves, expected_leaves, strict=True):
        if not isinstance(other, torch.Tensor):
            assert one == other
            continue
        assert one.device.type == "mps"
        assert one.stride() == other.stride()
        torch.testing.assert_close(one.cpu(), other, equal_nan=True)


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
    "add": lambda x=view(3, 4), y=view(3, 4): x + y,
    "add-broadcast": lambda x=view(3, 4), y=view(4): x + y,
    "add-number": lambda x=view(3, 4): x + 1.5,
    "add-0-dim-cpu": lambda x=view(3, 4): x + torch.tensor(2.5),
    "sub-half": lambda x=view(3, 4), y=view(3, 4): x.half() - y.half(),
    "mul-bfloat16": lambda x=view(3, 4), y=view(3, 4): x.bfloat16() * y.bfloat16(),
    "div-promotes": lambda x=view(3, 4), y=index(5, 3, 4): (x, y + 1),
    "pow": lambda x=positive(3, 4): x.pow(2.5),
    "exp-log": lambda x=positive(3, 4): x.log().exp(),
    "erf": lambda x=view(3, 4): x.erf(),
    "clamp": lambda x=view(3, 4): x.clamp(-0.5, 0.5),
    "where": lambda x=view(3, 4), y=view(3, 4): torch.where(x > 0, x, y),
    "where-number": lambda x=view(3, 4): torch.where(x > 0, x, 0.0),
    "masked-fill": lambda x=view(3, 4): x.masked_fill(x > 0, float("-inf")),
    "masked-select": lambda x=view(3, 4): x[x > 0],
    "sum": lambda x=view(3, 4): x.sum(0, keepdim=True),
    "mean": lambda x=view(3, 4): x.mean(),
    "var-mean": lambda x=view(3, 4): torch.var_mean(x, 1),
    "max-dim": lambda x=view(3, 4): tuple(x.max(1)),
    "amax": lambda x=view(3, 4): x.amax(0),
    "argmax": lambda x=view(3, 4): x.argmax(1),
    "logsumexp": lambda x=view(3, 4): x.logsumexp(1),
    "norm": lambda x=view(3, 4): torch.linalg.vector_norm(x, dim=1),
    "cumsum": lambda x=view(3, 4): x.cumsum(1),
    "sort": lambda x=view(3, 4): tuple(x.sort(1)),
    "topk": lambda x=view(3, 8): tuple(x.topk(3)),
    "unique": lambda x=index(4, 20): x.unique(),
    "nonzero": lambda x=view(3, 4): (x > 0).nonzero(),
    "cat": lambda x=view(3, 4), y=view(2, 4): torch.cat([x, y]),
    "stack": lambda x=view(3, 4), y=view(3, 4): torch.stack([x, y], 1),
    "chunk": lambda x=view(3, 4): x.chunk(2, 1),
    "repeat": lambda x=view(3, 4): x.repeat(2, 1),
    "repeat-interleave": lambda x=view(3, 4): x.repeat_interleave(2, 1),
    "roll": lambda x=view(3, 4): x.roll(1, 0),
    "flip": lambda x=view(3, 4): x.flip(1),
    "tril": lambda x=view(4, 4): x.tril(),
    "pad": lambda x=view(3, 4): F.pad(x, (1, 2)),
    "gather": lambda x=view(3, 4), i=index(4, 3, 2): x.gather(1, i),
    "scatter": lambda x=view(3, 4), i=index(4, 3, 2): x.scatter(1, i, 0.5),
    "index-select": lambda x=view(3, 4), i=index(3, 5): x.index_select(0, i),
    "index": lambda x=view(3, 4), i=index(3, 5): x[i, 1],
    "index-by-cpu-tensor": lambda x=view(3, 4): x[torch.tensor([2, 0])],
    "mm": lambda x=view(3, 4), y=view(4, 5): x @ y,
    "mm-transposed": lambda x=view(3, 4), y=view(5, 4): x @ y.t(),
    "bmm": lambda x=view(2, 3, 4), y=view(2, 4, 5): x @ y,
    "addmm": lambda x=view(5), y=view(3, 4), z=view(4, 5): torch.addmm(x, y, z),
    "einsum": lambda x=view(2, 3, 4), y=view(2, 5, 4): torch.einsum("bqd,bkd->bqk", x, y),
    "linear": lambda x=view(2, 3, 4), w=view(5, 4), b=view(5): F.linear(x, w, b),
    "softmax": lambda x=view(3, 4): x.softmax(1),
    "softmax-half-in-float": lambda x=view(3, 4): x.half().softmax(1, dtype=torch.float32),
    "log-softmax": lambda x=view(3, 4): x.log_softmax(1),
    "gelu": lambda x=view(3, 4): F.gelu(x, approximate="tanh"),
    "silu": lambda x=view(3, 4): F.silu(x),
    "layer-norm": lambda x=view(3, 8), w=view(8), b=view(8): F.layer_norm(x, (8,), w, b),
    "rms-norm": lambda x=view(3, 8), w=view(8): F.rms_norm(x, (8,), w),
    "group-norm": lambda x=view(2, 4, 3): F.group_norm(x, 2),
    "batch-norm": lambda x=view(4, 3): F.batch_norm(x, None, None, training=True),
    "embedding": lambda w=view(6, 4), i=index(6, 2, 3): F.embedding(i, w),
    "conv1d": lambda x=view(2, 3, 8), w=view(4, 3, 3): F.conv1d(x, w, padding=1),
    "conv2d": lambda x=view(2, 3, 6, 6), w=view(4, 3, 3, 3): F.conv2d(x, w, stride=2),
    "conv-transpose": lambda x=view(2, 3, 4), w=view(3, 2, 3): F.conv_transpose1d(x, w),
    "max-pool": lambda x=view(2, 3, 6, 6): F.max_pool2d(x, 2),
    "interpolate": lambda x=view(1, 2, 4, 4): F.interpolate(x, scale_factor=2, mode="bilinear"),
    "cross-entropy": lambda x=view(3, 5), i=index(5, 3): F.cross_entropy(x, i),
    "mse": lambda x=view(3, 5), y=view(3, 5): F.mse_loss(x, y),
    "svd-values": lambda x=view(4, 3): torch.linalg.svdvals(x),
    "solve": lambda x=view(3, 3), y=view(3, 2): torch.linalg.solve(x, y).contiguous(),
    "fft": lambda x=view(8): torch.view_as_real(torch.fft.rfft(x)),
    "complex": lambda x=view(3, 4), y=view(3, 4): torch.view_as_real(torch.complex(x, y).conj() * 2),
    "to-dtype": lambda x=view(3, 4): (x.to(torch.int32), x.to(torch.bool), x.bfloat16()),
    "clone-channels-last": lambda x=view(1, 3, 4, 4): x.clone(memory_format=torch.channels_last),
    "expand": lambda x=view(3, 1): x.expand(2, 3, 4),
    "arange-like": lambda x=view(5): torch.arange(5, device=x.device) + x,
    "new-full": lambda x=view(5): x.new_full((2, 2), 3.5),
    "empty-size": lambda x=dense(0, 4), y=dense(4, 3): (x @ y, x.sum(), torch.cat([x, x])),
    "sdpa": lambda q=view(1, 2, 5, 8), k=view(1, 2, 7, 8): F.scaled_dot_product_attention(q, k, k),
}


def arguments(function):
    return function.__defaults__


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_and_gradient_equal_the_cpus(device, name):
    function = OPERATORS[name]
    inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in arguments(function)]
    moved = on(device, inputs)
    expected, got = function(*inputs), function(*moved)
    assert_same(got, expected)
    differentiable = [[t for t in tree_flatten(out)[0] if t.requires_grad] for out in (expected, got)]
    if differentiable[0]:
        for outs in differentiable:
            sum(out.float().square().sum() for out in outs).backward()
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
    "scatter_add_": lambda x: x.scatter_add_(1, torch.ones(3, 1, dtype=torch.int64, device=x.device),
                                             torch.ones(3, 1, device=x.device)),
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


@pytest.mark.parametrize("make", [
    lambda device: torch.ones(2, dtype=torch.float64, device=device),
    lambda device: torch.empty_strided((2,), (1,), dtype=torch.complex128, device=device),
    lambda device: torch.ones(2, dtype=torch.float64).to(device),
    lambda device: torch.ones(2, device=device).double(),
])
def test_float64_is_refused_as_on_a_mac(device, make):
    with pytest.raises(TypeError, match="doesn't support float64"):
        make(device)


def test_copies_convert_and_keep_layouts(device):
    x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    moved = x.to(device, non_blocking=True)
    assert moved.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(moved.cpu(), x)
    assert torch.equal(moved.to("cpu", torch.float64), x.double())
    assert torch.equal(x.transpose(1, 3)[1].to(device).cpu(), x.transpose(1, 3)[1])
    back = torch.empty(4, 3)
    back.t().copy_(torch.arange(12.0, device=device).view(3, 4))
    assert torch.equal(back.t(), torch.arange(12.0).view(3, 4))


def test_memory_of_the_host_is_refused(device):
    with pytest.raises(TypeError, match="can't convert mps:0 device type tensor to numpy"):
        torch.ones(2, device=device).numpy()


def test_pinned_memory(device):
    x = torch.randn(5).pin_memory()
    assert x.is_pinned() and x[2:].is_pinned() and not torch.randn(5).is_pinned()
    assert torch.equal(x.to(device, non_blocking=True).cpu(), x)


def test_storage_is_the_metal_buffer(device):
    x = torch.zeros(6, device=device)
    assert x[2:].data_ptr() - x.data_ptr() == 8
    host = torch.mps._host_alias_storage(x.untyped_storage())
    assert host.nbytes() == 24 and host.device.type == "cpu"
    torch.empty(0).set_(host)[1] = 4
    assert x.tolist() == [0, 4, 0, 0, 0, 0]


def test_resize_and_set(device):
    x = torch.arange(4.0, device=device)
    x.resize_(2, 4)
    assert x[0].tolist() == [0, 1, 2, 3] and x.untyped_storage().nbytes() == 32
    y = torch.empty(0, device=device).set_(x.untyped_storage(), 1, (2,), (2,))
    assert y.tolist() == [1, 3]
    assert y.set_().numel() == 0
    with pytest.raises(RuntimeError, match="device"):
        y.set_(torch.ones(2).untyped_storage())


def test_uninitialised_memory_is_nan(device):
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.empty(3, device=device).isnan().all()
    assert torch.empty_strided((2, 2), (1, 2), dtype=torch.half, device=device).isnan().all()
    assert torch.zeros(1, device=device).resize_(3)[1:].isnan().all()


def test_poison_without_the_deterministic_switch(device, checked):
    torch.use_deterministic_algorithms(False)
    assert torch.empty(1000, device=device).isnan().all()


def test_memory_counters(device):
    before = torch.mps.current_allocated_memory()
    x = torch.empty(1000, device=device)
    assert torch.mps.current_allocated_memory() - before == 4000
    assert torch.mps.driver_allocated_memory() >= 4000
    assert torch.accelerator.max_memory_allocated() >= before + 4000
    del x
    torch.mps.empty_cache()
    assert torch.mps.current_allocated_memory() == before
    assert torch.mps.recommended_max_memory() > 2**30


def test_out_of_memory(device):
    torch.mps.set_per_process_memory_fraction(1e-9)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="MPS backend out of memory"):
            torch.empty(1000, device=device)
    finally:
        torch.mps.set_per_process_memory_fraction(0.0)
    torch.empty(1000, device=device)


def test_where_torch_looks_for_the_device(device):
    assert torch.backends.mps.is_available() and torch.backends.mps.is_built()
    assert torch.mps.is_available() and torch.mps.device_count() == 1
    assert torch.backends.mps.is_macos13_or_newer() and torch.backends.mps.get_core_count() > 0
    assert torch.backends.mps.get_name()
    assert torch.accelerator.current_accelerator().type == "mps"
    assert torch.get_device_module("mps") is torch.mps
    assert "mps:0" in repr(torch.ones(2, device=device))


def test_events(device):
    for event in (torch.mps.Event, lambda **kw: torch.Event("mps", **kw)):
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        torch.ones(10, device=device).sum()
        end.record()
        end.synchronize()
        assert end.query() and start.elapsed_time(end) > 0


RANDOM = {
    "rand": lambda **kw: torch.rand(50, **kw),
    "randn": lambda **kw: torch.randn(50, **kw),
    "randint": lambda **kw: torch.randint(1000, (50,), **kw),
    "randperm": lambda **kw: torch.randperm(50, **kw),
    "bernoulli": lambda **kw: torch.full((50,), 0.5, device="mps").bernoulli_(
        **{k: v for k, v in kw.items() if k == "generator"}),
    "multinomial": lambda **kw: torch.ones(50, device="mps").multinomial(
        50, **{k: v for k, v in kw.items() if k == "generator"}),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_follow_the_seed(device, name):
    draw = RANDOM[name]
    torch.manual_seed(7)
    first, second = draw(device=device), draw(device=device)
    assert not torch.equal(first, second)
    torch.mps.manual_seed(7)
    assert torch.equal(draw(device=device), first)
    generator = torch.Generator(device="mps").manual_seed(7)
    assert torch.equal(draw(device=device, generator=generator), first)
    assert generator.initial_seed() == 7


@pytest.mark.parametrize("drop", [
    lambda x: F.dropout(x, 0.5), lambda x: torch.native_dropout(x, 0.5, True)[0],
    lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
])
def test_dropout_follows_the_seed_of_mps(device, drop):
    x = torch.ones(1, 8, 16, device=device)
    torch.mps.manual_seed(3)
    first, second = drop(x), drop(x)
    torch.mps.manual_seed(3)
    torch.rand(5)
    assert torch.equal(drop(x), first) and not torch.equal(first, second)


def test_generator_state(device):
    generator = torch.Generator(device="mps").manual_seed(3)
    torch.rand(5, device=device, generator=generator)
    state = generator.get_state()
    expected = torch.rand(5, device=device, generator=generator)
    twin = generator.clone_state()
    generator.set_state(state)
    assert torch.equal(torch.rand(5, device=device, generator=generator), expected)
    assert torch.equal(torch.rand(5, device=device, generator=twin),
                       torch.rand(5, device=device, generator=generator))
    state = torch.mps.get_rng_state()
    expected = torch.rand(5, device=device)
    torch.mps.set_rng_state(state)
    assert torch.equal(torch.rand(5, device=device), expected)
    with pytest.raises(RuntimeError, match="Expected a 'mps' device type for generator"):
        torch.rand(5, device=device, generator=torch.Generator())


def test_random_numbers_leave_the_cpus_alone(device):
    torch.manual_seed(1)
    expected = torch.rand(5)
    torch.manual_seed(1)
    torch.rand(5, device=device)
    F.dropout(torch.ones(5, device=device))
    assert torch.equal(torch.rand(5), expected)


OPTIMISERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_training_equals_the_cpus(device, name):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 2))
    twin = copy.deepcopy(model).to(device)
    x = torch.randn(6, 4)
    for net, inputs in ((model, x), (twin, x.to(device))):
        optimiser = OPTIMISERS[name](net.parameters())

        def loss(net=net, inputs=inputs, optimiser=optimiser):
            optimiser.zero_grad()
            value = net(inputs).square().mean()
            value.backward()
            return value

        for _ in range(3):
            optimiser.step(loss)
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    for got, expected in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got.cpu(), expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(got.grad.cpu(), expected.grad, atol=1e-5, rtol=1e-4)


MODULES = {
    "lstm": (lambda: nn.LSTM(4, 5, 2, batch_first=True), (2, 3, 4)),
    "gru": (lambda: nn.GRU(4, 5), (3, 2, 4)),
    "conv": (lambda: nn.Conv2d(3, 4, 3, padding=1, groups=1), (2, 3, 6, 6)),
    "batch-norm": (lambda: nn.BatchNorm2d(3), (2, 3, 4, 4)),
    "attention": (lambda: nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True), (2, 5, 16)),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_module_equals_the_cpus(device, name, training):
    make, shape = MODULES[name]
    module = make().train(training)
    twin = copy.deepcopy(module).to(device)
    x = torch.randn(shape)
    results = []
    for net, where in ((module, "cpu"), (twin, device)):
        with torch.no_grad():
            quiet = net(x.to(where))
        inputs = x.to(where, copy=True).requires_grad_()
        out = net(inputs)
        tree_flatten(out)[0][0].square().sum().backward()
        results.append([quiet, out, inputs.grad, [p.grad for p in net.parameters()]])
    for expected, got in zip(*(tree_flatten(result)[0] for result in results), strict=True):
        torch.testing.assert_close(got.cpu(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("options", [
    {}, {"is_causal": True}, {"mask": "bool"}, {"mask": "float"}, {"scale": 0.3}, {"gqa": True},
], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sdpa_is_the_math_path(device, dtype, options, grad):
    heads = 2 if options.get("gqa") else 4
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, heads, 7, 8), torch.randn(2, heads, 7, 8)
    inputs = [x.to(dtype).requires_grad_(grad) for x in (q, k, v)]
    mask = {None: None, "bool": torch.rand(5, 7) > 0.3, "float": torch.randn(5, 7).to(dtype)}[
        options.get("mask")]
    kwargs = {"is_causal": options.get("is_causal", False), "scale": options.get("scale"),
              "enable_gqa": options.get("gqa", False)}
    expected = torch.ops.aten._scaled_dot_product_attention_math(*inputs, mask if mask is None or
                                                                 mask.dtype != torch.bool else
                                                                 torch.zeros(5, 7, dtype=dtype)
                                                                 .masked_fill(~mask, -torch.inf),
                                                                 **kwargs)[0]
    moved = on(device, inputs)
    got = F.scaled_dot_product_attention(*moved, attn_mask=None if mask is None else mask.to(device),
                                         **kwargs)
    torch.testing.assert_close(got.cpu(), expected)
    if grad:
        expected.sum().backward()
        got.sum().backward()
        for one, other in zip(moved, inputs, strict=True):
            torch.testing.assert_close(one.grad.cpu(), other.grad)


def test_autocast(device):
    x, w = torch.randn(2, 8, device=device), torch.randn(8, 8, device=device)
    with torch.autocast("mps", dtype=torch.float16):
        assert (x @ w).dtype == torch.float16
        assert F.layer_norm(x @ w, (8,)).dtype == torch.float32
    assert (x @ w).dtype == torch.float32


@pytest.mark.parametrize("dynamic", [True, False])
def test_compile(device, dynamic):
    model = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True).to(device)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for length in (3, 5):
        x = torch.randn(2, length, 16, device=device, requires_grad=True)
        y = x.detach().requires_grad_()
        compiled(x).square().sum().backward()
        model(y).square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad)


def test_function_transforms(device):
    x = torch.randn(3, 4, device=device)
    torch.testing.assert_close(torch.func.grad(lambda z: z.pow(3).sum())(x), 3 * x * x)
    torch.testing.assert_close(torch.func.vmap(torch.sin)(x), x.sin())
    torch.testing.assert_close(torch.func.jvp(torch.sin, (x,), (x,))[1], x.cos() * x)
    y = x.detach().requires_grad_()
    (first,) = torch.autograd.grad(y.pow(3).sum(), y, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), y)[0], 6 * x)


def test_inference_mode(device):
    x = torch.ones(3, 3, device=device)
    with torch.inference_mode():
        part = (x @ x)[1:]
        part.add_(1)
        assert part.is_inference() and part.eq(4).all() and len(part.nonzero()) == 6


def test_save_load_copy(device):
    x = torch.randn(4, 6, device=device)[1:, ::2]
    file = io.BytesIO()
    torch.save({"x": x, "base": x._base}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded["x"].device.type == "mps" and torch.equal(loaded["x"], x)
    assert loaded["x"].untyped_storage().data_ptr() == loaded["base"].untyped_storage().data_ptr()
    file.seek(0)
    assert torch.equal(torch.load(file, map_location="cpu")["x"], x.cpu())
    file = io.BytesIO()
    torch.save(x.cpu(), file)
    file.seek(0)
    assert torch.equal(torch.load(file, map_location="mps"), x)
    assert torch.equal(pickle.loads(pickle.dumps(x)), x)
    twin = copy.deepcopy(x)
    twin.zero_()
    assert x.any() and twin.stride() == x.stride()


def test_threads(device):
    wrong = []

    def work(number):
        for _ in range(50):
            x = torch.full((16, 16), float(number), device=device, requires_grad=True)
            (x * x).sum().backward()
            if not torch.equal(x.grad, 2 * x):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_import_of_the_package_changes_nothing():
    done = run_python("import torch, torch_flash_mps\n"
                      "assert not torch.backends.mps.is_available()\n"
                      "torch.empty(1, device='mps')")
    assert "with arguments from the 'MPS' backend" in done.stderr, done.stderr


def test_late_import():
    """Torch has looked for the device in vain, and has run a backward pass without it."""
    done = run_python(
        "import torch\n"
        "assert not torch.backends.mps.is_available() and not torch.accelerator.is_available()\n"
        "torch.ones(2, requires_grad=True).sum().backward()\n"
        "import torch_flash_mps.simulator\n"
        "assert torch.backends.mps.is_available() and torch.accelerator.is_available()\n"
        "x = torch.ones(2, device='mps', requires_grad=True)\n"
        "(3 * x).sum().backward()\n"
        "print(x.grad.tolist())")
    assert done.stdout.strip() == "[3.0, 3.0]", done.stderr


def test_controls(simulator):
    simulator.reset_counters()
    assert simulator.counters() == []
    assert simulator.stats()["bytes_allocated"] >= 0
    module = simulator._module
    before = module.checks_enabled()
    with simulator.checks(not before):
        assert module.checks_enabled() is not before
    assert module.checks_enabled() is before
    simulator.shuffle(5)
    assert module.shuffle_seed() == 5
    simulator.shuffle(None)
    assert module.shuffle_seed() is None
