"""Every operator of a score_mod: its Metal source and that of its derivative, against torch.

All are compiled into one kernel, which evaluates them side by side.
"""

import sys

import pytest

if sys.platform == "darwin":
    pytest.skip("kernels of the test's own run on the simulated device", allow_module_level=True)

import math
from pathlib import Path

import numpy as np
import torch

from torch_flash_mps.flex import msl
from torch_flash_mps.flex.derivative import derivatives
from torch_flash_mps.flex.evaluate import evaluate
from torch_flash_mps.flex.trace import trace
from torch_flash_mps.flex.values import SCORE, Expressions

METAL = Path(__file__).resolve().parent.parent / "metal"
CAPTURED = torch.ones(4)
BIG = 3_000_000_000   # beyond 32 bits


def in_place(s, b, h, q, k):
    """As T5 counts its buckets."""
    bucket = 0
    bucket += (k > q).to(torch.long) * 8
    same = bucket
    distance = (q - k).abs()
    bucket += torch.where(distance < 4, distance, distance.clamp_max_(7))
    bucket &= 63
    score = s * 2
    score -= bucket
    score.mul_(0.25).masked_fill_(same == 3, 1.0).tanh_()
    return score


# name: the function of (s, b, h, q, k)
FLOATS = {
    "add": lambda s, b, h, q, k: s + q,
    "add-alpha": lambda s, b, h, q, k: torch.add(s, q, alpha=3),
    "sub": lambda s, b, h, q, k: k - s,
    "rsub": lambda s, b, h, q, k: 2.5 - s,
    "mul": lambda s, b, h, q, k: s * s * (q - k),
    "div": lambda s, b, h, q, k: s / (k + 1) + (q + 1) / (s * s + 1),
    "integers-divided": lambda s, b, h, q, k: s * (q / (k + 1)),
    "neg": lambda s, b, h, q, k: -s,
    "abs": lambda s, b, h, q, k: s.abs() + (q - k).abs(),
    "minimum": lambda s, b, h, q, k: torch.minimum(s, torch.full_like(s, 0.25)) + torch.min(q, k),
    "maximum": lambda s, b, h, q, k: torch.max(s, -s * 3) + torch.maximum(q, k),
    "clamp": lambda s, b, h, q, k: s.clamp(-1, 1.5) * 2 + (q - k).clamp(-2, 2),
    "clamp-one-side": lambda s, b, h, q, k: s.clamp(min=0.1) + torch.clamp_max(s * 2, 0.5),
    "clamp-by-tensors": lambda s, b, h, q, k: torch.clamp(s, s * 0.5 - 1, s * 0.25 + 1),
    "exp": lambda s, b, h, q, k: torch.exp(s * 0.5),
    "exp2": lambda s, b, h, q, k: torch.exp2(s * 0.5) + s * torch.exp2(-((h + 1) * 8.0 / 4)),
    "log": lambda s, b, h, q, k: torch.log(s * s + 0.5),
    "tanh": lambda s, b, h, q, k: torch.tanh(s) * 3,
    "sigmoid": lambda s, b, h, q, k: torch.sigmoid(s) * 3,
    "sqrt": lambda s, b, h, q, k: torch.sqrt(s * s + 1) + torch.rsqrt(s * s + 2),
    "reciprocal": lambda s, b, h, q, k: (s * s + 1).reciprocal() + 1 / (k + 1),
    "powers": lambda s, b, h, q, k: s**2 + s**3 * 0.1 + (s * s + 1) ** 0.5 + (s * s + 1) ** -2,
    "pow": lambda s, b, h, q, k: (s.abs() + 0.5) ** 1.7 + 2.0 ** (s * 0.3)
    + (s * s + 1) ** (s * 0.1),
    "integer-powers": lambda s, b, h, q, k: s + (q - k) ** 2 + (k + 1) ** 3,
    "where": lambda s, b, h, q, k: torch.where(q >= k, s * 2, s * s),
    "where-infinite": lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")),
    "masked-fill": lambda s, b, h, q, k: (s * 3).masked_fill(q < k, -1.0),
    "floor-divide": lambda s, b, h, q, k: s + torch.div(s * 4, 0.75, rounding_mode="floor"),
    "trunc-divide": lambda s, b, h, q, k: torch.div(s * 4, 0.75, rounding_mode="trunc") + s,
    "remainder": lambda s, b, h, q, k: (s * 3) % 1.25 + (q - 3.5) % (s * s + 1),
    "fmod": lambda s, b, h, q, k: torch.fmod(s * 3, 1.25) + torch.fmod(q - 3.5, s * s + 1),
    "cast-to-integer": lambda s, b, h, q, k: s * (s * 3).to(torch.int64) + (s * 5).int(),
    "cast-to-bool": lambda s, b, h, q, k: s * (q - k).bool() + (s * 0).bool() + q.to(torch.bool),
    "cast-to-float": lambda s, b, h, q, k: s * (q > k) + (q == k).float(),
    "constants": lambda s, b, h, q, k: s * torch.tensor(1.5) + s.new_ones(()) - torch.zeros_like(s)
    + torch.full((), 3, dtype=torch.int64) * torch.ones_like(q),
    "in-place": in_place,
    "no-op": lambda s, b, h, q, k: s.clone().detach() * 0 + s + b * h,
}
INTEGERS = {
    "floor-divide": lambda s, b, h, q, k: (q - 6) // 4 * 100 + (q - 6) // (k - 4.0).long(),
    "floor-divide-of-scores": lambda s, b, h, q, k: (s * 4) // 0.75 + (s * 4) // (q - 3.5),
    "trunc-divide": lambda s, b, h, q, k: torch.div(q - 6, k - 4, rounding_mode="trunc"),
    "remainder": lambda s, b, h, q, k: (q - 6) % 4 * 100 + (q - 6) % (k - 4),
    "fmod": lambda s, b, h, q, k: torch.fmod(q - 6, 4) * 100 + torch.fmod(q - 6, k - 4),
    "divided-by-0": lambda s, b, h, q, k: (q + 1) // (k * 0) + (q + 1) % (k * 0),
    "bits": lambda s, b, h, q, k: ((q & 6) | (k << 3)) ^ (~q),
    "shifts": lambda s, b, h, q, k: ((q - 6) << k) + ((q * 1000 - 6000) >> k) + (q >> 70),
    "64-bit": lambda s, b, h, q, k: (q * BIG + k) // 7 - (q * BIG) % 1000 + k * -BIG,
    "32-bit-dtype": lambda s, b, h, q, k: q.int() * 1000 - k.to(torch.int32) // 2,
    "minimum": lambda s, b, h, q, k: torch.min(q - 6, k - 3) * 10 + (q - BIG).clamp(min=-5),
    "comparisons": lambda s, b, h, q, k: (q < k) * 1 + (q <= k) * 2 + (q > k) * 4 + (q >= k) * 8
    + (q == k) * 16 + (q != k) * 32 + (q + 0.5 < k) * 64 + (q * BIG > k) * 128,
    "of-scores": lambda s, b, h, q, k: (s < 0) * 1 + (s <= 0.5) * 2 + (s > q - 5) * 4
    + (s >= 0) * 8,
    "logical": lambda s, b, h, q, k: ((q > 3) & (k > 2)) * 1 + ((q > 3) | (k > 2)) * 2
    + ((q > 3) ^ (k > 2)) * 4 + (~(q > 3)) * 8 + torch.logical_and(q, k) * 16
    + torch.logical_or(q, k) * 32 + torch.logical_xor(q, k) * 64 + torch.logical_not(q) * 128,
    "where": lambda s, b, h, q, k: torch.where(q > k, q * BIG, k - 4),
}


def indices():
    q, k = torch.meshgrid(torch.arange(12), torch.arange(12), indexing="ij")
    b, h = torch.full((144,), 2), torch.full((144,), 3)
    return {"b": b, "h": h, "q_idx": q.flatten(), "kv_idx": k.flatten()}


def scores():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(144, generator=generator) * 1.5


def expected(function, is_float):
    """Values and slopes, float64; the function's integers are exact."""
    s = scores().double().requires_grad_(is_float)
    value = function(s, *indices().values())
    slope = torch.zeros(144)
    if is_float and value.requires_grad:
        (slope,) = torch.autograd.grad(value.sum(), s)
    return value.detach().double(), slope


def expressions(functions):
    for name, function in functions.items():
        make = Expressions()
        value = trace(name, function, True, torch.device("cpu"), make)
        yield name, value, derivatives(make, value, [make.argument(SCORE)])[0]


def run_compiled(simulator, expressions):
    """[expression, 144] of float32: each evaluated by Metal source."""
    lines = ["#include <metal_stdlib>", "struct UserCode {};"]
    contract = (METAL / "attn_params.h").read_text().replace("#pragma once", "")
    operators = (METAL / "user_ops.h").read_text().replace("#pragma once", "")
    lines += [contract, operators.replace('#include "attn_params.h"', ""),
              "using namespace flash_mps;"]
    calls = []
    parameters = "float score, int b, int h, int q_idx, int kv_idx"
    for number, value in enumerate(expressions):
        lines += msl._function(f"float f{number}", parameters, value, [])
        calls.append(f"out[{number} * 144 + n] = f{number}(UserCode(), s[n], 2, 3, q, k);")
    lines.append(f"""
      kernel void evaluate(const device float* s [[buffer(0)]], device float* out [[buffer(1)]],
                           uint n [[thread_position_in_grid]]) {{
        const int q = int(n) / 12;
        const int k = int(n) % 12;
        {' '.join(calls)}
      }}""")
    kernel = simulator.Library("\n".join(lines)).kernel("evaluate", {12: ("bool", True)})
    out = np.zeros((len(calls), 144), dtype=np.float32)
    kernel(scores().numpy(), out, grid=(144, 1, 1), threadgroup=(1, 1, 1))
    return torch.from_numpy(out)


@pytest.fixture(scope="module")
def results(simulator):
    """By name: value and slope of each function, as compiled and as torch operators."""
    everything = [(f"{kind}-{name}", value, slope)
                  for kind, functions in (("float", FLOATS), ("integer", INTEGERS))
                  for name, value, slope in expressions(functions)]
    compiled = run_compiled(simulator, [one for _, *pair in everything for one in pair])
    arguments = {"score": scores(), **indices()}
    return {name: (compiled[2 * i], compiled[2 * i + 1],
                   *(x.expand(144) for x in evaluate(pair, arguments, [])))
            for i, (name, *pair) in enumerate(everything)}


def close(got, wanted):
    """Within a few roundings of float32, at infinities exactly."""
    finite = torch.isfinite(wanted)
    assert (got[~finite].double() == wanted[~finite]).all()
    got, wanted = got[finite].double(), wanted[finite]
    error = (got - wanted).abs() / wanted.abs().clamp(min=1.0)
    worst = int(error.argmax())
    assert error[worst] < 3e-6, f"{worst}: expected {wanted[worst]}, got {got[worst]}"


@pytest.mark.parametrize("name", FLOATS)
def test_float_operator(results, name):
    value, slope = expected(FLOATS[name], True)
    compiled, compiled_slope, evaluated, evaluated_slope = results[f"float-{name}"]
    for got, wanted in ((compiled, value), (evaluated, value), (compiled_slope, slope),
                        (evaluated_slope, slope)):
        close(got, wanted)


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_operator(results, name):
    if name in ("divided-by-0", "floor-divide", "trunc-divide", "remainder", "fmod"):
        wanted = torch.tensor([python_value(name, int(q), int(k)) for q, k in zip(
            indices()["q_idx"], indices()["kv_idx"], strict=True)])
    else:
        wanted, _ = expected(INTEGERS[name], False)
    compiled, slope, evaluated, _ = results[f"integer-{name}"]
    assert (compiled == wanted.float()).all() and (evaluated == wanted.float()).all()
    assert (slope == 0).all()


def python_value(name, q, k):
    """Divisions in Python's integers, where torch refuses to divide by 0; ours give 0."""
    a, b = q - 6, k - 4
    rest = math.fmod(a, b) if b else 0
    return {"divided-by-0": 0,
            "floor-divide": a // 4 * 100 + (a // b if b else 0),
            "trunc-divide": int(a / b) if b else 0,
            "remainder": a % 4 * 100 + (a % b if b else 0),
            "fmod": int(math.fmod(a, 4)) * 100 + int(rest)}[name]


def test_NaN_stays_NaN(simulator):
    make = Expressions()
    functions = [lambda s, b, h, q, k: torch.minimum(s / 0 * 0, s),
                 lambda s, b, h, q, k: (s / 0 * 0).clamp(-1, 1),
                 lambda s, b, h, q, k: torch.max(s, s / 0 * 0)]
    values = [trace("f", one, True, torch.device("cpu"), make) for one in functions]
    assert torch.isnan(run_compiled(simulator, values)).all()


def test_16_bit_values_are_rounded(simulator):
    make = Expressions()
    functions = [lambda s, b, h, q, k: s.half() * 3 + q, lambda s, b, h, q, k: s.bfloat16() / 3,
                 lambda s, b, h, q, k: s.half() * 0.1,
                 lambda s, b, h, q, k: s.bfloat16() * 0.05 + 3.3]
    values = [trace("f", one, True, torch.device("cpu"), make) for one in functions]
    pair = (scores(), *indices().values())
    arguments = {"score": scores(), **indices()}
    compiled = run_compiled(simulator, values)
    for value, got, function in zip(values, compiled, functions, strict=True):
        assert (got == torch.vmap(function)(*pair).float()).all()
        assert (got == evaluate([value], arguments, [])[0]).all()


def test_numbers_beyond_a_float_dtype_are_infinite(simulator):
    make = Expressions()
    functions = [lambda s, b, h, q, k: torch.where(q >= k, s, torch.finfo(torch.float64).min),
                 lambda s, b, h, q, k: torch.where(q >= k, s.half(), 1e39)]
    values = [trace("f", one, True, torch.device("cpu"), make) for one in functions]
    pair = indices()
    arguments = {"score": scores(), **pair}
    is_past = pair["q_idx"] >= pair["kv_idx"]
    wanted = [torch.where(is_past, scores(), -math.inf),
              torch.where(is_past, scores().half().float(), math.inf)]
    assert torch.equal(run_compiled(simulator, values), torch.stack(wanted))
    for one, value in zip(wanted, values, strict=True):
        assert torch.equal(evaluate([value], arguments, [])[0].float(), one)


def test_integers_have_32_bits_where_they_fit():
    make = Expressions()
    value = trace("f", lambda s, b, h, q, k: s + ((q - k) * 8 + k) % 30 + q * k, True,
                  torch.device("cpu"), make)
    text = "\n".join(msl._function("float f", "", value, []))
    assert text.count("int64_t v") == 1 and "int64_t(q_idx) * int64_t(kv_idx)" in text


@pytest.mark.parametrize(("function", "operator"), [
    (lambda s, b, h, q, k: s + CAPTURED[1].mul_(2), "aten.mul_.Tensor"),
    (lambda s, b, h, q, k: s + q.add_(1), "aten.add_.Tensor"),
    (lambda s, b, h, q, k: (x := s * 2).detach() + x.add_(q), "aten.add_.Tensor"),
    (lambda s, b, h, q, k: s + s.half().add_(s * 2), "aten.add_.Tensor"),
], ids=["captured", "argument", "beside-a-view", "of-another-dtype"])
def test_in_place_on_what_others_see_is_an_error(function, operator):
    with pytest.raises(NotImplementedError, match=f"{operator} on other than a scalar of its own"):
        trace("score_mod", function, True, torch.device("cpu"), Expressions())


def test_an_unknown_operator_in_place_is_an_error():
    with pytest.raises(NotImplementedError, match="aten.sin_, which is not supported"):
        trace("f", lambda s, b, h, q, k: (s * 2).sin_(), True, torch.device("cpu"), Expressions())
