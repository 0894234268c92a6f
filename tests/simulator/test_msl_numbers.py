"""What Metal says of rounding, conversions, vectors and mathematics. Runs on a Mac as well."""

import numpy as np
import pytest
import torch
from shaders import ON_MAC, Shaders, bfloat_bits, filled, from_bfloat_bits

CONVERSIONS = """
kernel void to_half(device half* out [[buffer(0)]], const device float* in [[buffer(1)]],
                    uint i [[thread_position_in_grid]]) { out[i] = half(in[i]); }
kernel void to_bfloat(device bfloat* out [[buffer(0)]], const device float* in [[buffer(1)]],
                      uint i [[thread_position_in_grid]]) { out[i] = bfloat(in[i]); }
kernel void to_half_by_vector(device half4* out [[buffer(0)]],
                              const device float4* in [[buffer(1)]],
                              uint i [[thread_position_in_grid]]) { out[i] = half4(in[i]); }
kernel void to_bfloat_by_vector(device bfloat4* out [[buffer(0)]],
                                const device float4* in [[buffer(1)]],
                                uint i [[thread_position_in_grid]]) { out[i] = bfloat4(in[i]); }
kernel void from_half(device float* out [[buffer(0)]], const device half* in [[buffer(1)]],
                      uint i [[thread_position_in_grid]]) { out[i] = float(in[i]); }
kernel void from_bfloat(device float* out [[buffer(0)]], const device bfloat* in [[buffer(1)]],
                        uint i [[thread_position_in_grid]]) { out[i] = float(in[i]); }

// Each operation rounds once, and a chain of them after each.
#define ARITHMETIC(T)                                                                          \\
  kernel void arithmetic_##T(device T* out [[buffer(0)]], const device T* in [[buffer(1)]],    \\
                             uint i [[thread_position_in_grid]],                               \\
                             uint n [[threads_per_grid]]) {                                    \\
    const T x = in[i], y = in[n + i];                                                          \\
    out[i] = x + y;                                                                            \\
    out[n + i] = x * y;                                                                        \\
    out[2 * n + i] = x - y;                                                                    \\
    T sum = x;                                                                                 \\
    sum += y;                                                                                  \\
    sum += y;                                                                                  \\
    out[3 * n + i] = sum;                                                                      \\
    out[4 * n + i] = T(float(x) + float(y) * 0.25f);                                           \\
  }
ARITHMETIC(half)
ARITHMETIC(bfloat)

kernel void integers(device int* out [[buffer(0)]], const device float* in [[buffer(1)]],
                     uint i [[thread_position_in_grid]], uint n [[threads_per_grid]]) {
  const float x = in[i];
  out[i] = int(x);
  out[n + i] = short(x);
  out[2 * n + i] = char(x);
  out[3 * n + i] = int(uchar(uint(abs(x))));
  out[4 * n + i] = int(float(int(x) * 16777 + 1));
  out[5 * n + i] = as_type<int>(float(uint(abs(x)) + 0xFFFFFF00u));
  out[6 * n + i] = int(half(int(x)));
  out[7 * n + i] = bool(x);
}

kernel void bits(device uint* out [[buffer(0)]], const device uint* in [[buffer(1)]]) {
  const uint x = in[0];
  out[0] = as_type<uint>(as_type<float>(x));
  out[1] = as_type<uint>(as_type<half2>(x).yx);
  out[2] = as_type<uint>(as_type<uchar4>(x).wzyx);
  out[3] = as_type<uint>(as_type<short2>(x) + short2(1, 2));
  out[4] = as_type<ushort>(half(1.5h));
  out[5] = as_type<ushort>(bfloat(1.5f));
  out[6] = as_type<uint>(as_type<bfloat2>(x).yx);
  out[7] = uint(as_type<ulong>(uint2(x, 7)) >> 28);
  out[8] = popcount(x);
  out[9] = clz(x);
  out[10] = ctz(x);
  out[11] = reverse_bits(x);
  out[12] = rotate(x, 12u);
  out[13] = mulhi(x, x);
  out[14] = extract_bits(x, 8, 12);
  out[15] = insert_bits(x, 0xABu, 4, 8);
  out[16] = uint(clz(ushort(x)));
  out[17] = addsat(x, x);
  out[18] = subsat(5u, x);
  out[19] = absdiff(3u, x);
  out[20] = uint(abs(int(x)));
  out[21] = uint(mulhi(int(x), 3));
  out[22] = min(x, 5u) + max(x, 5u);
  out[23] = clamp(x, 2u, 9u);
}

kernel void vectors(device float* out [[buffer(0)]], const device float4* in [[buffer(1)]]) {
  const float4 v = in[0];
  device float4* rows = reinterpret_cast<device float4*>(out);
  rows[0] = v.wzyx;
  rows[1] = v.xxyy;
  rows[2] = v.rgba.bgra;
  float4 w = v;
  w.xz = w.zx;
  w.w += 1;
  rows[3] = w;
  rows[4] = float4(v.xy, 7, 8);
  rows[5] = float4(1, v.yzw);
  rows[6] = float4(2);
  rows[7] = float4(float3(v.z), v[1]);
  w[2] = -1;
  rows[8] = w;
  rows[9] = v * 2 + float4(1, 2, 3, 4) / 2;
  rows[10] = float4(int4(v * 1.75f));
  rows[11] = float4(v.xyz + float3(v.w), dot(v, v));
  rows[12] = select(v, -v, v > 2.0f);
  rows[13] = float4(any(v > 3.0f), all(v > 3.0f), length(v.xy), cross(v.xyz, v.yzx).x);
  rows[14] = float4(half4(v) * half(0.5));
  rows[15] = float4(packed_float3(v.xyz).y, float2(packed_half2(half2(v.zw))), sizeof(float3));
  rows[16] = float4(max(v, 2.0f).x, min(v, v.yxwz).y, fma(v, v, v).z, float4(uchar4(v)).w);
}
"""
# For each thread's x: what MSL says, the function in float64, and the error that Metal allows in
# ulp of the result (precise). The fast variants get a relative error of 2^-17.
FUNCTIONS = {
    "exp": (np.exp, 4, (-80, 80)), "exp2": (np.exp2, 4, (-120, 120)),
    "log": (np.log, 4, (1e-30, 1e30)), "log2": (np.log2, 4, (1e-30, 1e30)),
    "tanh": (np.tanh, 5, (-12, 12)), "rsqrt": (lambda x: x**-0.5, 2, (1e-30, 1e30)),
    "sqrt": (np.sqrt, 0.5, (0, 1e30)), "sin": (np.sin, 4, (-3, 3)), "cos": (np.cos, 4, (-1.5, 1.5)),
}
# Exact answers. x runs over SPECIAL, y over the same in reverse.
EXACT = {
    "max(x, y)": np.fmax, "min(x, y)": np.fmin, "fmax(x, y)": np.fmax, "fmin(x, y)": np.fmin,
    "abs(x)": np.abs, "fabs(x)": np.abs, "floor(x)": np.floor, "ceil(x)": np.ceil,
    "trunc(x)": np.trunc, "rint(x)": np.rint, "copysign(x, y)": np.copysign,
    "float(isnan(x))": np.isnan, "float(isinf(x))": np.isinf, "float(isfinite(x))": np.isfinite,
    "select(x, y, i % 2 == 1)": lambda x, y: np.where(np.arange(len(x)) % 2 == 1, y, x),
    "step(0.5f, x)": lambda x: np.where(x < 0.5, 0, 1),
    "clamp(x, -1.5f, 2.0f)": lambda x: np.fmin(np.fmax(x, -1.5), 2),
    "saturate(x)": lambda x: np.fmin(np.fmax(x, 0), 1),
    "sign(x)": lambda x: np.where(np.isnan(x), 0, np.sign(x)),
    "round(x)": lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x),
    "mix(x, 3.0f, 0.0f) * 0 + mix(2.0f, 4.0f, 0.25f)": lambda x: x * 0 + 2.5,
    "exp2(floor(x))": lambda x: np.exp2(np.floor(x.astype(np.float64))),
    "x == y ? 1.0f : x < y ? 2.0f : 3.0f":
        lambda x, y: np.where(x == y, 1, np.where(x < y, 2, 3)),
}
SPECIAL = np.array([0.0, -0.0, 1, -1, 0.5, -0.5, 1.5, 2.5, -2.5, 2, 127, -126, 8388607, np.inf,
                    -np.inf, np.nan, 1, np.inf, 3, 0.25], dtype=np.float32)
MATHS = "".join(
    f"""
kernel void maths_{name}(device float* out [[buffer(0)]], const device float* in [[buffer(1)]],
                         uint i [[thread_position_in_grid]], uint n [[threads_per_grid]]) {{
  out[i] = precise::{name}(in[i]);
  out[n + i] = fast::{name}(in[i]);
  out[2 * n + i] = {name}(in[i]);
  out[3 * n + i] = {name}(float2(1, in[i])).y;
  out[4 * n + i] = float({name}(half(in[i])));
  out[5 * n + i] = float({name}(bfloat(in[i])));
}}
""" for name in FUNCTIONS)
EXACT_KERNEL = """
kernel void exact(device float* out [[buffer(0)]], const device float* in [[buffer(1)]],
                  uint i [[thread_position_in_grid]], uint n [[threads_per_grid]]) {
  const float x = in[i], y = in[n - 1 - i];
""" + "".join(f"  out[{row} * n + i] = {one};\n" for row, one in enumerate(EXACT)) + "}\n"


@pytest.fixture(scope="module")
def shader(simulator):
    return Shaders(CONVERSIONS + MATHS + EXACT_KERNEL)


def hard_floats() -> np.ndarray:
    """Every place where rounding to half or bfloat could go wrong, and many random patterns."""
    half = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)[::7]
    bfloat = from_bfloat_bits(np.arange(0x7F80, dtype=np.uint16)[::7]).astype(np.float64)
    places = []
    for grid in (half, bfloat):
        middle = ((grid[:-1] + grid[1:]) / 2).astype(np.float32)
        places += [grid.astype(np.float32), middle, np.nextafter(middle, np.float32(np.inf)),
                   np.nextafter(middle, np.float32(0))]
    ties = np.arange(2048, 4200, dtype=np.float32)   # halves are even numbers here
    edges = np.array([65504, 65519.996, 65520, 65536, 3.3895314e38, 3.3961775e38, 3.4028235e38,
                      np.inf, np.nan, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25, 2.0**-133, 2.0**-134, 0],
                     dtype=np.float32)
    patterns = np.random.default_rng(1).integers(0, 1 << 32, 8192, dtype=np.uint32)
    values = np.concatenate([*places, ties, edges, patterns.view(np.float32)])
    if ON_MAC:   # a GPU takes subnormal floats as zero
        values = values[~((values != 0) & (abs(values) < 2.0**-126))]
    values = np.concatenate([values, -values])
    return values[:len(values) // 4 * 4]


def same(found: np.ndarray, expected: np.ndarray) -> bool:
    """Equal bits, but that one NaN is as good as another."""
    are_nan = np.isnan(expected)
    unsigned = f"u{found.itemsize}"
    return (np.isnan(found) == are_nan).all() and (
        found.view(unsigned)[~are_nan] == expected.view(unsigned)[~are_nan]).all()


@pytest.mark.parametrize("suffix, width", [("", 1), ("_by_vector", 4)])
def test_rounding(shader, flavour, suffix, width):
    values = hard_floats()
    size = {"threads": len(values) // width, "group_size": 256}
    out = filled(len(values), dtype=np.float16)
    shader.run("to_half" + suffix, out, values, **size)
    assert same(out, torch.from_numpy(values).half().numpy())
    out = filled(len(values), dtype=np.int16)
    shader.run("to_bfloat" + suffix, out, values, **size)
    assert same(from_bfloat_bits(out), from_bfloat_bits(bfloat_bits(values)))


def test_widening(shader, flavour):
    patterns, out = np.arange(1 << 16, dtype=np.uint16), filled(1 << 16)
    size = {"threads": 1 << 16, "group_size": 256}
    shader.run("from_half", out, patterns, **size)
    assert same(out, patterns.view(np.float16).astype(np.float32))
    shader.run("from_bfloat", out, patterns, **size)
    expected = from_bfloat_bits(patterns)
    is_subnormal = (expected != 0) & (abs(expected) < 2.0**-126) & ON_MAC
    assert same(out[~is_subnormal], expected[~is_subnormal])


@pytest.mark.parametrize("msl_type, dtype", [("half", torch.float16), ("bfloat", torch.bfloat16)])
def test_arithmetic_rounds_each_time(shader, flavour, msl_type, dtype):
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(2, 4096, generator=generator) * torch.tensor([[1.0], [0.1]])).to(dtype)
    x[:4] = torch.tensor([torch.finfo(dtype).max, float("inf"), float("nan"), -0.0])
    y[:4] = torch.tensor([torch.finfo(dtype).max, float("-inf"), 1.0, 0.0])
    given = torch.cat([x, y]).view(torch.int16).numpy()
    out = filled(5, 4096, dtype=np.int16)
    shader.run(f"arithmetic_{msl_type}", out, given, threads=4096, group_size=256)
    mixed = (x.float() + y.float() * 0.25).to(dtype)
    expected = torch.stack([x + y, x * y, x - y, x + y + y, mixed])
    found = torch.from_numpy(out).view(dtype)
    assert same(found.float().numpy(), expected.float().numpy())


def test_integer_conversions(shader, flavour):
    x = np.array([0, 0.99, -0.99, 1.5, -1.5, 100.7, -100.7, 5], dtype=np.float32)
    out = filled(8, len(x), dtype=np.int32)
    shader.run("integers", out, x, threads=len(x), group_size=len(x))
    whole = np.trunc(x).astype(np.int32)
    scaled = (whole * 16777 + 1).astype(np.float32).astype(np.int32)
    big = (np.abs(whole).astype(np.int64) + 0xFFFFFF00).astype(np.float32).view(np.int32)
    for row, expected in zip(out, [whole, whole, whole, abs(whole), scaled, big, whole, x != 0],
                             strict=True):
        assert row.tolist() == expected.astype(np.int64).tolist()


def test_bits(shader, flavour):
    x, out = 0x89ABCDE4, filled(24, dtype=np.uint32)
    shader.run("bits", out, np.array([x], dtype=np.uint32), threads=1, group_size=1)
    signed = x - (1 << 32)
    assert out.tolist() == [
        x, 0xCDE489AB, 0xE4CDAB89, 0x89ADCDE5, 0x3E00, 0x3FC0, 0xCDE489AB, 0x78, x.bit_count(), 0,
        2, int(f"{x:032b}"[::-1], 2), 0xBCDE489A, x * x >> 32, x >> 8 & 0xFFF, x & ~0xFF0 | 0xAB0,
        0, 0xFFFFFFFF, 0, x - 3, -signed, signed * 3 >> 32 & 0xFFFFFFFF, x + 5, 9]


def test_vectors(shader, flavour):
    out = filled(17, 4)
    shader.run("vectors", out, np.array([1, 2, 3, 4], dtype=np.float32), threads=1, group_size=1)
    assert out.tolist() == [
        [4, 3, 2, 1], [1, 1, 2, 2], [3, 2, 1, 4], [3, 2, 1, 5], [1, 2, 7, 8], [1, 2, 3, 4],
        [2, 2, 2, 2], [3, 3, 3, 2], [3, 2, -1, 5], [2.5, 5, 7.5, 10], [1, 3, 5, 7], [5, 6, 7, 30],
        [1, 2, -3, -4], [1, 0, np.float32(5**0.5), -7], [0.5, 1, 1.5, 2], [2, 3, 4, 16],
        [2, 1, 12, 4]]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_mathematics(shader, flavour, name):
    function, ulp, (low, high) = FUNCTIONS[name]
    count = 2048
    x = np.geomspace(low or 1e-30, high, count) if low >= 0 else np.linspace(low, high, count)
    x = x.astype(np.float32)
    out = filled(6, count)
    shader.run(f"maths_{name}", out, x, threads=count, group_size=256)
    exact = function(x.astype(np.float64))
    spacing = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    slack = 1e-30   # where log crosses zero
    assert (abs(out[0] - exact) <= ulp * spacing + slack).all(), "precise"
    for row in out[1:4]:
        assert (abs(row - exact) <= 2.0**-17 * np.maximum(abs(exact), 2.0**-6)).all(), "fast"
    with np.errstate(all="ignore"):
        for row, narrow, precision in [(out[4], x.astype(np.float16).astype(np.float64), 2.0**-10),
                                       (out[5], from_bfloat_bits(bfloat_bits(x)), 2.0**-7)]:
            exact = function(narrow.astype(np.float64))
            is_fair = (abs(exact) < 60000) & (abs(exact) > 1e-4)
            assert is_fair.sum() > 100
            assert (abs(row - exact)[is_fair] <= precision * abs(exact)[is_fair]).all(), "narrow"


def test_exact_functions(shader, flavour):
    out = filled(len(EXACT), len(SPECIAL))
    shader.run("exact", out, SPECIAL, threads=len(SPECIAL), group_size=len(SPECIAL))
    x, y = SPECIAL, SPECIAL[::-1]
    with np.errstate(all="ignore"):
        for row, (statement, function) in zip(out, EXACT.items(), strict=True):
            expected = np.asarray(function(x, y) if "y" in statement else function(x))
            assert np.array_equal(row, expected.astype(np.float32), equal_nan=True), statement
