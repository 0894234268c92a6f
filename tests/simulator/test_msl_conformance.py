"""What Metal says of simdgroups, barriers, atomics and thread positions. Runs on a Mac as well."""

import numpy as np
import pytest
from shaders import Shaders, filled

LANES = np.arange(32)
# Each is a statement of MSL for lane `i` with its value `x`, and what lane i gets.
SHUFFLES = {
    "simd_shuffle(x, ushort(31 - i))": lambda x: x[31 - LANES],
    "simd_shuffle(x, ushort(5))": lambda x: np.full(32, x[5]),
    "simd_broadcast(x, ushort(9))": lambda x: np.full(32, x[9]),
    "simd_broadcast_first(x)": lambda x: np.full(32, x[0]),
    "simd_shuffle_xor(x, ushort(1))": lambda x: x[LANES ^ 1],
    "simd_shuffle_xor(x, ushort(8))": lambda x: x[LANES ^ 8],
    "simd_shuffle_xor(x, ushort(21))": lambda x: x[LANES ^ 21],
    "simd_shuffle_rotate_up(x, ushort(3))": lambda x: x[(LANES - 3) % 32],
    "simd_shuffle_rotate_down(x, ushort(3))": lambda x: x[(LANES + 3) % 32],
    "simd_shuffle_and_fill_up(x, T(7 * x), ushort(2))": lambda x: np.append(7 * x[30:], x[:30]),
    "simd_shuffle_and_fill_down(x, T(7 * x), ushort(2))": lambda x: np.append(x[2:], 7 * x[:2]),
    "quad_broadcast(x, ushort(2))": lambda x: x[LANES // 4 * 4 + 2],
    "quad_shuffle_xor(x, ushort(3))": lambda x: x[LANES ^ 3],
}
# A lane that reaches beyond the simdgroup gets what MSL leaves undefined.
HALF_DEFINED = {
    "simd_shuffle_up(x, ushort(4))": (lambda x: x[LANES - 4], LANES >= 4),
    "simd_shuffle_down(x, ushort(4))": (lambda x: x[(LANES + 4) % 32], LANES < 28),
}
REDUCTIONS = {
    "simd_sum(x)": lambda x: np.full(32, x.sum()),
    "simd_max(x)": lambda x: np.full(32, x.max()),
    "simd_min(x)": lambda x: np.full(32, x.min()),
    "simd_product(x % 2 == 0 ? T(1) : T(-1))": lambda x: np.full(32, (-1) ** (x % 2).sum()),
    "simd_prefix_inclusive_sum(x)": lambda x: x.cumsum(),
    "simd_prefix_exclusive_sum(x)": lambda x: x.cumsum() - x,
    "simd_prefix_inclusive_product(x % 3 == 0 ? T(-1) : T(1))":
        lambda x: np.cumprod(np.where(x % 3 == 0, -1, 1)),
    "simd_prefix_exclusive_product(x % 3 == 0 ? T(-1) : T(1))":
        lambda x: np.append(1, np.cumprod(np.where(x % 3 == 0, -1, 1))[:-1]),
    "quad_sum(x)": lambda x: x.reshape(8, 4).sum(1).repeat(4),
    "quad_max(x)": lambda x: x.reshape(8, 4).max(1).repeat(4),
}
BITWISE = {
    "simd_and(x | 8)": lambda x: np.full(32, np.bitwise_and.reduce(x | 8)),
    "simd_or(x)": lambda x: np.full(32, np.bitwise_or.reduce(x)),
    "simd_xor(x)": lambda x: np.full(32, np.bitwise_xor.reduce(x)),
    "T(simd_all(x < 1000))": lambda x: np.ones(32),
    "T(simd_all(i != 13))": lambda x: np.zeros(32),
    "T(simd_any(i == 13))": lambda x: np.ones(32),
    "T(simd_any(x > 1000))": lambda x: np.zeros(32),
    "T(uint64_t(simd_ballot(i % 3 == 0)) >> 1 & 0x7FFF)":
        lambda x: np.full(32, sum(1 << n for n in range(0, 32, 3)) >> 1 & 0x7FFF),
    "T(uint64_t(simd_active_threads_mask()) == 0xFFFFFFFF)": lambda x: np.ones(32),
    "T(simd_is_first())": lambda x: LANES == 0,
}
TYPES = {"int": np.int32, "uint": np.uint32, "float": np.float32, "half": np.float16,
         "short": np.int16, "ushort": np.uint16}


def lane_kernel(msl_type: str) -> str:
    """Row n of `out` is what statement n gives each lane."""
    statements = list(SHUFFLES) + list(HALF_DEFINED) + list(REDUCTIONS)
    is_integer = not np.issubdtype(TYPES[msl_type], np.floating)
    if not is_integer:
        statements = [one.replace("x %", "int(x) %") for one in statements]
    lines = [f"  out[{32 * row} + i] = {one};"
             for row, one in enumerate(statements + list(BITWISE) * is_integer)]
    return "\n".join([f"kernel void lanes_{msl_type}(device {msl_type}* out [[buffer(0)]],",
                      f"    const device {msl_type}* in [[buffer(1)]],",
                      "    ushort i [[thread_index_in_simdgroup]]) {",
                      f"  using T = {msl_type};\n  const T x = in[i];", *lines, "}\n"])


SOURCE = "".join(map(lane_kernel, TYPES)) + """
kernel void vectors(device float4* out [[buffer(0)]], const device float4* in [[buffer(1)]],
                    uint i [[thread_index_in_simdgroup]]) {
  out[i] = simd_shuffle_xor(in[i], ushort(2));
  out[32 + i] = simd_sum(in[i]);
  out[64 + i] = simd_max(in[i]);
}

// The last simdgroup of a threadgroup of 40 has eight lanes.
kernel void partial_simdgroup(device int* out [[buffer(0)]], uint i [[thread_position_in_grid]],
                              uint t [[thread_index_in_threadgroup]]) {
  out[i] = simd_sum(int(t)) + (simd_all(true) ? 10000 : 0);
}

kernel void tree(device float* out [[buffer(0)]], const device float* in [[buffer(1)]],
                 uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]],
                 uint size [[threads_per_threadgroup]],
                 uint group [[threadgroup_position_in_grid]]) {
  threadgroup float sums[256];
  sums[t] = in[i];
  for (uint step = size / 2; step > 0; step /= 2) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (t < step) sums[t] += sums[t + step];
  }
  if (t == 0) out[group] = sums[0];
}

kernel void reverse_in_simdgroup(device int* out [[buffer(0)]],
                                 uint t [[thread_index_in_threadgroup]],
                                 uint lane [[thread_index_in_simdgroup]]) {
  threadgroup int values[64];
  values[t] = int(t);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  out[t] = values[t - lane + 31 - lane];
}

kernel void through_device_memory(device int* out [[buffer(0)]],
                                  uint t [[thread_index_in_threadgroup]]) {
  out[t] = int(t * t);
  threadgroup_barrier(mem_flags::mem_device);
  const int mine = out[63 - t];
  threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
  out[t] = mine;
}

kernel void atomics(device atomic_int* signed_one [[buffer(0)]],
                    device atomic_uint* bits [[buffer(1)]], device atomic_float* sum [[buffer(2)]],
                    device uint* seen [[buffer(3)]], device uint* local [[buffer(4)]],
                    uint i [[thread_position_in_grid]],
                    uint t [[thread_index_in_threadgroup]],
                    uint group [[threadgroup_position_in_grid]]) {
  atomic_fetch_max_explicit(&signed_one[0], int(i) - 40, memory_order_relaxed);
  atomic_fetch_min_explicit(&signed_one[1], int(i) - 40, memory_order_relaxed);
  atomic_fetch_sub_explicit(&signed_one[2], 2, memory_order_relaxed);
  atomic_fetch_or_explicit(&bits[0], 1u << i % 16, memory_order_relaxed);
  atomic_fetch_and_explicit(&bits[1], ~(1u << i % 16), memory_order_relaxed);
  atomic_fetch_xor_explicit(&bits[2], i, memory_order_relaxed);
  atomic_fetch_add_explicit(&sum[0], 0.5f, memory_order_relaxed);
  seen[atomic_fetch_add_explicit(&bits[3], 1u, memory_order_relaxed)] = i;
  uint expected = atomic_load_explicit(&bits[4], memory_order_relaxed);
  while (!atomic_compare_exchange_weak_explicit(&bits[4], &expected, expected + i,
                                                memory_order_relaxed, memory_order_relaxed)) {}
  threadgroup atomic_uint count;
  if (t == 0) atomic_store_explicit(&count, 100u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&count, t, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t == 0) local[group] = atomic_exchange_explicit(&count, 0u, memory_order_relaxed);
}

kernel void positions(device uint* out [[buffer(0)]], uint3 grid [[thread_position_in_grid]],
                      ushort3 local [[thread_position_in_threadgroup]],
                      uint2 group [[threadgroup_position_in_grid]],
                      ushort index [[thread_index_in_threadgroup]],
                      ushort lane [[thread_index_in_simdgroup]],
                      uint simdgroup [[simdgroup_index_in_threadgroup]],
                      uint3 size [[threads_per_threadgroup]],
                      ushort2 full_size [[dispatch_threads_per_threadgroup]],
                      uint3 threads [[threads_per_grid]], ushort3 groups [[threadgroups_per_grid]],
                      ushort simdgroups [[simdgroups_per_threadgroup]],
                      uint width [[threads_per_simdgroup]]) {
  const uint values[] = {local.x, local.y, local.z, group.x, group.y, index, lane, simdgroup,
                         size.x, size.y, size.z, full_size.x, full_size.y, threads.x, threads.y,
                         threads.z, groups.x, groups.y, groups.z, simdgroups, width};
  const uint place = (grid.z * threads.y + grid.y) * threads.x + grid.x;
  for (uint n = 0; n < 21; ++n) out[21 * place + n] = values[n];
}

kernel void scalar_positions(device uint* out [[buffer(0)]], ushort i [[thread_position_in_grid]],
                             uint t [[thread_position_in_threadgroup]],
                             ushort group [[threadgroup_position_in_grid]],
                             ushort size [[threads_per_threadgroup]],
                             uint threads [[threads_per_grid]],
                             uint groups [[threadgroups_per_grid]]) {
  const uint values[] = {t, group, size, threads, groups};
  for (uint n = 0; n < 5; ++n) out[5 * i + n] = values[n];
}
"""


@pytest.fixture(scope="module")
def shader(simulator):
    return Shaders(SOURCE)


@pytest.mark.parametrize("msl_type", TYPES)
def test_simd_functions(shader, flavour, msl_type):
    dtype = TYPES[msl_type]
    x = (LANES * 7 % 32 + 3).astype(dtype)
    named = SHUFFLES | {name: one for name, (one, _) in HALF_DEFINED.items()} | REDUCTIONS
    if not np.issubdtype(dtype, np.floating):
        named |= BITWISE
    out = filled(len(named), 32, dtype=dtype)
    shader.run(f"lanes_{msl_type}", out, x)
    wide = x.astype(np.int64)
    for row, (statement, expected) in zip(out, named.items(), strict=True):
        is_defined = HALF_DEFINED[statement][1] if statement in HALF_DEFINED else slice(None)
        want = np.asarray(expected(wide)).astype(dtype)
        assert row[is_defined].tolist() == want[is_defined].tolist(), statement


def test_simd_functions_of_vectors(shader, flavour):
    x = np.random.default_rng(0).integers(-50, 50, (32, 4)).astype(np.float32)
    out = filled(3, 32, 4)
    shader.run("vectors", out, x)
    assert (out[0] == x[LANES ^ 2]).all()
    assert (out[1] == x.sum(0)).all()
    assert (out[2] == x.max(0)).all()


def test_a_partial_simdgroup(shader, flavour):
    out = filled(80, dtype=np.int32)
    shader.run("partial_simdgroup", out, threads=80, group_size=40)
    one = [10000 + sum(range(32))] * 32 + [10000 + sum(range(32, 40))] * 8
    assert out.tolist() == one * 2


@pytest.mark.parametrize("size", [1, 32, 64, 256])
def test_a_tree_of_barriers(shader, flavour, size):
    x = np.random.default_rng(size).integers(-99, 99, 4 * size).astype(np.float32)
    out = filled(4)
    shader.run("tree", out, x, threads=4 * size, group_size=size)
    assert out.tolist() == x.reshape(4, size).sum(1).tolist()


def test_a_simdgroup_barrier_orders_a_simdgroup(shader, flavour):
    out = filled(64, dtype=np.int32)
    shader.run("reverse_in_simdgroup", out, threads=64, group_size=64)
    assert out.tolist() == [*range(31, -1, -1), *range(63, 31, -1)]


def test_a_barrier_for_device_memory(shader, flavour):
    out = filled(64, dtype=np.int32)
    shader.run("through_device_memory", out, threads=64, group_size=64)
    assert out.tolist() == [n * n for n in range(63, -1, -1)]


def test_atomics(shader, flavour):
    signed_one = np.array([-1000, 1000, 0], dtype=np.int32)
    bits = np.array([0, 0xFFFFF, 0, 0, 5], dtype=np.uint32)
    total, seen, local = np.zeros(1, np.float32), filled(96, dtype=np.uint32), filled(
        3, dtype=np.uint32)
    shader.run("atomics", signed_one, bits, total, seen, local, threads=96, group_size=32)
    assert signed_one.tolist() == [55, -40, -192]
    assert bits.tolist() == [0xFFFF, 0xF0000, np.bitwise_xor.reduce(np.arange(96)), 96,
                             5 + sum(range(96))]
    assert total[0] == 48
    assert sorted(seen.tolist()) == list(range(96)), "each gets a number of its own"
    assert local.tolist() == [100 + sum(range(32))] * 3


def test_positions(shader, flavour):
    """A grid that threadgroups of (8, 4, 2) do not fill: those at its edges are smaller."""
    threads, size = (13, 6, 3), (8, 4, 2)
    out = filled(3, 6, 13, 21, dtype=np.uint32)
    shader.run("positions", out, threads=threads, group_size=size)
    groups = [-(-n // of) for n, of in zip(threads, size, strict=True)]
    for z, y, x in np.ndindex(3, 6, 13):
        place = (x, y, z)
        group = [p // of for p, of in zip(place, size, strict=True)]
        local = [p % of for p, of in zip(place, size, strict=True)]
        own = [min(of, n - g * of) for of, n, g in zip(size, threads, group, strict=True)]
        index = (local[2] * own[1] + local[1]) * own[0] + local[0]
        simdgroups = -(-own[0] * own[1] * own[2] // 32)
        expected = [*local, *group[:2], index, index % 32, index // 32, *own, *size[:2], *threads,
                    *groups, simdgroups, 32]
        assert out[z, y, x].tolist() == expected, place


def test_scalar_positions(shader, flavour):
    out = filled(50, 5, dtype=np.uint32)
    shader.run("scalar_positions", out, threads=50, group_size=16)
    assert out.tolist() == [[i % 16, i // 16, 16 if i < 48 else 2, 50, 4] for i in range(50)]

