"""Modules, attention, optimisers and compilation on the simulated `mps` device, against the CPU."""

import copy
import sys

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from mps_compare import on
from torch.utils._pytree import tree_flatten

if sys.platform == "darwin":
    pytest.skip("these tests are about the simulated device", allow_module_level=True)

OPTIMISERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
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
    bias = mask
    if mask is not None and mask.dtype == torch.bool:
        bias = torch.zeros(5, 7, dtype=dtype).masked_fill(~mask, -torch.inf)
    kwargs = {"is_causal": options.get("is_causal", False), "scale": options.get("scale"),
              "enable_gqa": options.get("gqa", False)}
    expected = torch.ops.aten._scaled_dot_product_attention_math(*inputs, bias, **kwargs)[0]
    moved = on(device, inputs)
    moved_mask = None if mask is None else mask.to(device)
    got = F.scaled_dot_product_attention(*moved, attn_mask=moved_mask, **kwargs)
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
