"""What Metal says of simdgroup_matrix. Runs on a Mac as well."""

import numpy as np
import pytest
from shaders import Shaders, bfloat_bits, filled, from_bfloat_bits

LANES = np.arange(32)
BITS = [LANES >> bit & 1 for bit in range(5)]
# Lane l holds two neighbours of one row.
ROW = 4 * BITS[4] + 2 * BITS[2] + BITS[1]
COLUMN = 4 * BITS[3] + 2 * BITS[0]

MEMORY = """
kernel void elements_of_a_load(device float2* out [[buffer(0)]],
                               const device float* in [[buffer(1)]],
                               uint lane [[thread_index_in_simdgroup]]) {
  simdgroup_float8x8 m;
  simdgroup_load(m, in);
  out[lane] = float2(m.thread_elements()[0], m.thread_elements()[1]);
}

kernel void store_of_elements(device float* out [[buffer(0)]],
                              uint lane [[thread_index_in_simdgroup]]) {
  simdgroup_float8x8 m;
  m.thread_elements()[0] = 2 * lane;
  m.thread_elements()[1] = 2 * lane + 1;
  simdgroup_store(m, out);
}

// A window of `in`, 16 elements a row, through threadgroup memory with 12 a row.
#define COPY(name, T)                                                                          \\
  kernel void name(device T* out [[buffer(0)]], const device T* in [[buffer(1)]],              \\
                   constant uint& turned_in [[buffer(2)]],                                     \\
                   constant uint& turned_out [[buffer(3)]]) {                                  \\
    threadgroup T shared[12 * 12];                                                             \\
    simdgroup_matrix<T, 8, 8> m, n;                                                            \\
    simdgroup_load(m, in, 16, ulong2(3, 5), turned_in != 0);                                   \\
    simdgroup_store(m, shared, 12, ulong2(4, 1), turned_out != 0);                             \\
    simdgroup_barrier(mem_flags::mem_threadgroup);                                             \\
    simdgroup_load(n, shared + 12, 12, ulong2(4, 0), turned_out != 0);                         \\
    simdgroup_store(n, out, 9, ulong2(1, 2));                                                  \\
  }
COPY(copy_float, float)
COPY(copy_half, half)
COPY(copy_bfloat, bfloat)
"""
# Accumulator, left and right operand.
PRODUCTS = [("float", "float", "float"), ("half", "half", "half"), ("bfloat", "bfloat", "bfloat"),
            ("float", "half", "half"), ("float", "bfloat", "bfloat"), ("float", "float", "half")]
PRODUCT = """
kernel void NAME(device D* out [[buffer(0)]], const device A* a_in [[buffer(1)]],
                 const device B* b_in [[buffer(2)]], const device D* c_in [[buffer(3)]]) {
  simdgroup_matrix<A, 8, 8> a;
  simdgroup_matrix<B, 8, 8> b;
  simdgroup_matrix<D, 8, 8> c, d;
  simdgroup_load(a, a_in);
  simdgroup_load(b, b_in);
  simdgroup_load(c, c_in);
  simdgroup_multiply_accumulate(d, a, b, c);
  simdgroup_store(d, out);
  simdgroup_store(c, out + 64);
  simdgroup_multiply(d, a, b);
  simdgroup_store(d, out + 128);
  for (int n = 0; n < 3; ++n) simdgroup_multiply_accumulate(d, a, b, d);
  simdgroup_store(d, out + 192);
}
"""
CHAINS = """
using M = simdgroup_float8x8;

struct Tile { M left, right; };

M negated(M m) {
  m.thread_elements() = -m.thread_elements();
  return m;
}

kernel void chains(device float* out [[buffer(0)]], const device float* a_in [[buffer(1)]],
                   const device float* b_in [[buffer(2)]], const device float* c_in [[buffer(3)]]) {
  M a, b, c;
  simdgroup_load(a, a_in);
  simdgroup_load(b, b_in);
  simdgroup_load(c, c_in);

  M result_as_operand, again;
  simdgroup_multiply(result_as_operand, a, b);
  simdgroup_multiply_accumulate(again, result_as_operand, a, c);
  simdgroup_store(again, out);

  M pending, copy;
  simdgroup_multiply_accumulate(pending, a, b, c);
  copy = pending;
  simdgroup_multiply_accumulate(pending, a, a, pending);
  simdgroup_store(copy, out + 64);
  simdgroup_store(pending, out + 128);

  M itself = a;
  simdgroup_multiply_accumulate(itself, itself, b, c);
  simdgroup_store(itself, out + 192);
  itself = a;
  simdgroup_multiply_accumulate(itself, b, itself, itself);
  simdgroup_store(itself, out + 256);

  M overwritten;
  simdgroup_multiply(overwritten, a, b);
  simdgroup_load(overwritten, c_in);
  simdgroup_multiply_accumulate(overwritten, a, b, overwritten);
  overwritten.thread_elements() *= 2.0f;
  simdgroup_multiply_accumulate(overwritten, a, b, overwritten);
  simdgroup_store(overwritten, out + 320);

  M many = make_filled_simdgroup_matrix<float, 8, 8>(0.5f);
  for (int n = 0; n < 150; ++n) simdgroup_multiply_accumulate(many, a, b, many);
  simdgroup_store(many, out + 384);

  Tile tile;
  simdgroup_multiply(tile.left, a, b);
  simdgroup_multiply(tile.right, b, a);
  Tile other = tile;
  simdgroup_multiply_accumulate(other.left, a, b, other.right);
  simdgroup_store(negated(other.left), out + 448);
  simdgroup_store(tile.right, out + 512);

  M list[2][2];
  for (int n = 0; n < 4; ++n) list[n / 2][n % 2] = M(float(n));
  for (int n = 0; n < 4; ++n) {
    simdgroup_multiply_accumulate(list[n / 2][n % 2], a, b, list[n % 2][n / 2]);
  }
  simdgroup_store(list[1][0], out + 576);
  simdgroup_store(a * b, out + 640);
}

kernel void by_simdgroup(device float* out [[buffer(0)]], const device float* a_in [[buffer(1)]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]],
                         uint group [[threadgroup_position_in_grid]]) {
  simdgroup_float8x8 a, d(1);
  simdgroup_load(a, a_in);
  for (uint n = 0; n < simdgroup; ++n) simdgroup_multiply(d, d, a);
  simdgroup_store(d, out + 64 * (4 * group + simdgroup));
}
"""


def product_name(types) -> str:
    return "product_" + "_".join(types)


SOURCE = MEMORY + CHAINS + "".join(
    f"#define D {types[0]}\n#define A {types[1]}\n#define B {types[2]}\n"
    + PRODUCT.replace("NAME", product_name(types)) + "#undef D\n#undef A\n#undef B\n"
    for types in PRODUCTS)


@pytest.fixture(scope="module")
def shader(simulator):
    return Shaders(SOURCE)


def encoded(values: np.ndarray, msl_type: str) -> np.ndarray:
    if msl_type == "bfloat":
        return bfloat_bits(values)
    return np.asarray(values, {"float": np.float32, "half": np.float16}[msl_type])


def decoded(array: np.ndarray, msl_type: str) -> np.ndarray:
    return (from_bfloat_bits(array) if msl_type == "bfloat" else array).astype(np.float64)


def small_integers(seed: int, *shape: int, most: int = 1) -> np.ndarray:
    """Products of these are exact in every type."""
    return np.random.default_rng(seed).integers(-most, most + 1, shape).astype(np.float64)


def test_lanes_hold_what_metal_gives_them(shader, flavour):
    values, out = np.arange(64, dtype=np.float32), filled(32, 2)
    shader.run("elements_of_a_load", out, values)
    assert out.tolist() == [[8 * r + c, 8 * r + c + 1] for r, c in zip(ROW, COLUMN, strict=True)]
    out = filled(8, 8)
    shader.run("store_of_elements", out)
    assert out[ROW, COLUMN].tolist() == (2 * LANES).tolist()
    assert out[ROW, COLUMN + 1].tolist() == (2 * LANES + 1).tolist()


@pytest.mark.parametrize("msl_type", ["float", "half", "bfloat"])
def test_strides_origins_and_transposes(shader, flavour, msl_type):
    numbers = np.arange(16 * 16).reshape(16, 16)
    for turned_in, turned_out in np.ndindex(2, 2):
        out = encoded(np.full((10, 9), -1.0), msl_type)
        flags = [np.array([flag], dtype=np.uint32) for flag in (turned_in, turned_out)]
        # A transposed store with origin (4, 1) fills rows 1 to 8 and columns 4 to 11 as well.
        shader.run(f"copy_{msl_type}", out, encoded(numbers, msl_type), *flags)
        window = numbers[5:13, 3:11]
        expected = np.full((10, 9), -1.0)
        expected[2:10, 1:9] = window.T if turned_in else window
        assert decoded(out, msl_type).tolist() == expected.tolist(), (turned_in, turned_out)


@pytest.mark.parametrize("types", PRODUCTS, ids="_".join)
def test_products(shader, flavour, types):
    a, b, c = small_integers(1, 8, 8), small_integers(2, 8, 8), small_integers(3, 8, 8, most=9)
    out = encoded(np.zeros((4, 8, 8)), types[0])
    shader.run(product_name(types), out, encoded(a, types[1]), encoded(b, types[2]),
               encoded(c, types[0]))
    assert decoded(out, types[0]).tolist() == [
        (a @ b + c).tolist(), c.tolist(), (a @ b).tolist(), (4 * (a @ b)).tolist()]


@pytest.mark.parametrize("types", PRODUCTS, ids="_".join)
def test_products_that_round(shader, flavour, types):
    """Products of half and bfloat are summed in more bits than they have."""
    a, b, c = np.random.default_rng(4).standard_normal((3, 8, 8))
    a, b, c = (encoded(x, name) for x, name in zip((a, b, c), (*types[1:], types[0]), strict=True))
    out = encoded(np.zeros((4, 8, 8)), types[0])
    shader.run(product_name(types), out, a, b, c)
    a, b, c = (decoded(x, name) for x, name in zip((a, b, c), (*types[1:], types[0]), strict=True))
    precision = {"float": 2.0**-22, "half": 2.0**-10, "bfloat": 2.0**-7}[types[0]]
    bound = precision * (abs(a) @ abs(b) + abs(c))
    assert (abs(decoded(out, types[0])[0] - (a @ b + c)) <= bound).all()


def test_chains_copies_and_reuse(shader, flavour):
    a, b, c = small_integers(5, 8, 8, most=3), small_integers(6, 8, 8, most=3), small_integers(
        7, 8, 8, most=9)
    out = filled(11, 8, 8)
    shader.run("chains", out, *(x.astype(np.float32) for x in (a, b, c)))
    ab, identity = a @ b, np.eye(8)
    expected = {
        "a result as an operand": ab @ a + c,
        "a copy of a pending result": ab + c,
        "the original goes on": ab + c + a @ a,
        "d is a": ab + c,
        "d is b and c": b @ a + a,
        "a pending result is overwritten": 2 * (c + ab) + ab,
        "more products than the log holds": 150 * ab + 0.5,
        "members, and a copy as an argument": -(ab + b @ a),
        "the member that was copied": b @ a,
        "an array": 2 * (ab + identity),
        "operator *": ab,
    }
    for (what, matrix), found in zip(expected.items(), out, strict=True):
        assert found.tolist() == matrix.tolist(), what


def test_each_simdgroup_has_matrices_of_its_own(shader, flavour):
    a, out = small_integers(8, 8, 8).astype(np.float32), filled(8, 8, 8)
    shader.run("by_simdgroup", out, a, threads=256, group_size=128)
    powers = [np.linalg.matrix_power(a.astype(np.int64), n) for n in range(4)]
    assert out.tolist() == [power.astype(float).tolist() for power in powers * 2]
