"""Function constants specialise a kernel when it is built."""

import sys

import numpy as np
import pytest

if sys.platform == "darwin":
    pytest.skip("torch.mps.compile_shader takes no function constants", allow_module_level=True)

SOURCE = """
#include <metal_stdlib>
using namespace metal;

constant bool kIsOn [[function_constant(0)]];
constant int kSigned [[function_constant(1)]];
constant uint kUnsigned [[function_constant(20)]];
constant float kReal [[function_constant(3)]];
constant short kShort [[function_constant(4)]];
constant bool kHasBias = kIsOn && kSigned < 0;
constant bool kHasNoBias = !kHasBias;
constant int kTwice = 2 * kSigned;
constant bool kIsGiven = is_function_constant_defined(kShort);
constant int kOrNine = kIsGiven ? kShort : 9;

kernel void constants(device float* out [[buffer(0)]],
                      const device float* bias [[buffer(1), function_constant(kHasBias)]],
                      constant float& addend [[buffer(2), function_constant(kHasNoBias)]]) {
  out[0] = kIsOn;
  out[1] = kSigned;
  out[2] = kUnsigned;
  out[3] = kReal;
  out[4] = kTwice;
  out[5] = kOrNine;
  if (kHasBias) {
    out[6] = bias[0];
  } else {
    out[6] = addend;
  }
}

kernel void needs_none(device float* out [[buffer(0)]]) { out[0] = 1; }
"""
ON = {0: ("bool", True), 1: ("int", -7), 20: ("uint", 1 << 31), 3: ("float", 0.1)}
OFF = {0: ("bool", False), 1: ("int", 2**31 - 1), 20: ("uint", 0), 3: ("float", float("-inf")),
       4: ("short", -5)}
SIZE = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1)}


@pytest.fixture(scope="module")
def library(checked_metal):
    return checked_metal.Library(SOURCE)


def run(kernel, *arguments) -> list[float]:
    out = np.full(7, 77, dtype=np.float32)
    kernel(out, *arguments, **SIZE)
    return out.tolist()


def test_each_type_and_what_is_derived_from_it(library):
    bias, addend = np.array([3], dtype=np.float32), np.float32(4).tobytes()
    assert run(library.kernel("constants", ON), bias) == [
        1, -7, 2.0**31, np.float32(0.1), -14, 9, 3]
    assert run(library.kernel("constants", OFF), None, addend) == [
        0, 2.0**31, 0, -np.inf, -2, -5, 4]


@pytest.mark.parametrize("constants, missing", [(ON, "'bias' at buffer slot 1"),
                                                (OFF, "'addend' at buffer slot 2")])
def test_an_optional_argument_that_is_on_must_be_bound(library, constants, missing):
    with pytest.raises(RuntimeError, match=f"argument {missing}: expected a buffer or bytes"):
        run(library.kernel("constants", constants))


def test_a_constant_without_a_value(library):
    few = {index: value for index, value in ON.items() if index != 20}
    with pytest.raises(RuntimeError, match="kUnsigned"):
        library.kernel("constants", few)


def test_a_kernel_that_uses_no_constant_needs_no_value(library):
    out = np.zeros(1, dtype=np.float32)
    library.kernel("needs_none")(out, **SIZE)
    assert out[0] == 1
