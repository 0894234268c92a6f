// Lane l with bits b4..b0 holds row 4*b4 + 2*b2 + b1, columns c and c+1 with c = 4*b3 + 2*b0. So eight
// consecutive lanes are one 4x4 quadrant in row-major order: quadrant 2*b4 + b3 is 16 floats that need
// no permutation, and an 8x8 product is eight products of quadrants.
#include "matrix_log.h"

#include <bit>
#include <cstring>

namespace sim {
namespace {

#define SIM_INLINE inline __attribute__((always_inline))

using Row = float __attribute__((vector_size(16)));
using Quadrant = float __attribute__((vector_size(64)));
using Pairs = double __attribute__((vector_size(64)));  // eight lanes; double carries two floats

struct Matrix {
  Quadrant quadrants[4];
};

// Vectors this wide are passed by reference only: their calling convention depends on the target.
template <int k>
SIM_INLINE void add_outer_product(Quadrant& d, const Quadrant& a, const float* b) {
  Row row;
  std::memcpy(&row, b + 4 * k, sizeof row);
  d += __builtin_shufflevector(a, a, k, k, k, k, 4 + k, 4 + k, 4 + k, 4 + k, 8 + k, 8 + k, 8 + k,
                               8 + k, 12 + k, 12 + k, 12 + k, 12 + k) *
       __builtin_shufflevector(row, row, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3);
}

SIM_INLINE void add_quadrant_product(Quadrant& d, const Quadrant& a, const float* b) {
  add_outer_product<0>(d, a, b);
  add_outer_product<1>(d, a, b);
  add_outer_product<2>(d, a, b);
  add_outer_product<3>(d, a, b);
}

SIM_INLINE void add_product(Matrix& d, const MatrixProduct& product) {
  Matrix a;
  std::memcpy(&a, product.a, sizeof a);
  const float* b = &product.b[0][0];
  for (int inner = 0; inner < 2; ++inner) {
    for (int row = 0; row < 2; ++row) {
      for (int column = 0; column < 2; ++column) {
        add_quadrant_product(d.quadrants[2 * row + column], a.quadrants[2 * row + inner],
                             b + 16 * (2 * inner + column));
      }
    }
  }
}

SIM_INLINE float float_from_half(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7FFFu;
  if (magnitude >= 0x7C00u) return std::bit_cast<float>(sign | 0x7F800000u | (magnitude << 13));
  if (magnitude < 0x0400u) {
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(float(magnitude) * 0x1p-24f));
  }
  return std::bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));
}

SIM_INLINE uint16_t half_from_float(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return sign | 0x7E00u;
  if (magnitude >= 0x47800000u) return sign | 0x7C00u;
  if (magnitude < 0x38800000u) {  // subnormal: 0.5 has the spacing of a half's subnormals
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return sign | uint16_t(std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(0.5f));
  }
  const uint32_t odd = (magnitude >> 13) & 1u;
  return sign | uint16_t((magnitude - (112u << 23) + 0xFFFu + odd) >> 13);
}

SIM_INLINE float float_from_bfloat(uint16_t value) {
  return std::bit_cast<float>(uint32_t(value) << 16);
}

SIM_INLINE uint16_t bfloat_from_float(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return uint16_t((bits >> 16) | 0x0040u);
  return uint16_t((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

SIM_INLINE double pair_at(const void* address) {
  double pair;
  std::memcpy(&pair, address, sizeof pair);
  return pair;
}

SIM_INLINE Matrix load_floats(void* const* d) {
  Matrix matrix;
  for (int q = 0; q < 4; ++q, d += 8) {
    const Pairs pairs = {pair_at(d[0]), pair_at(d[1]), pair_at(d[2]), pair_at(d[3]),
                         pair_at(d[4]), pair_at(d[5]), pair_at(d[6]), pair_at(d[7])};
    matrix.quadrants[q] = Quadrant(pairs);
  }
  return matrix;
}

SIM_INLINE void store_floats(const Matrix& matrix, void* const* d) {
  for (int q = 0; q < 4; ++q, d += 8) {
    const Pairs pairs = Pairs(matrix.quadrants[q]);
    for (int lane = 0; lane < 8; ++lane) {
      const double pair = pairs[lane];
      std::memcpy(d[lane], &pair, sizeof pair);
    }
  }
}

template <float (*kWiden)(uint16_t)>
SIM_INLINE void load_narrow(Matrix& matrix, void* const* d) {
  float values[2 * kSimdWidth];
  for (uint32_t lane = 0; lane < kSimdWidth; ++lane) {
    uint16_t pair[2];
    std::memcpy(pair, d[lane], sizeof pair);
    values[2 * lane] = kWiden(pair[0]);
    values[2 * lane + 1] = kWiden(pair[1]);
  }
  std::memcpy(&matrix, values, sizeof matrix);
}

template <uint16_t (*kNarrow)(float)>
SIM_INLINE void store_narrow(const Matrix& matrix, void* const* d) {
  float values[2 * kSimdWidth];
  std::memcpy(values, &matrix, sizeof matrix);
  for (uint32_t lane = 0; lane < kSimdWidth; ++lane) {
    const uint16_t pair[2] = {kNarrow(values[2 * lane]), kNarrow(values[2 * lane + 1])};
    std::memcpy(d[lane], pair, sizeof pair);
  }
}

SIM_INLINE bool same_destination(const MatrixProduct& x, const MatrixProduct& y) {
  return x.d[0] == y.d[0] && x.d_type == y.d_type && !std::memcmp(x.d, y.d, sizeof x.d);
}

// Operands were logged by value, so products into different destinations do not depend on each
// other: a float destination is loaded once, and stays in registers for all of its products.
SIM_INLINE void add_to_floats(const MatrixProduct* products, uint64_t& pending) {
  const MatrixProduct& first = products[std::countr_zero(pending)];
  Matrix d = load_floats(first.d);
  for (uint64_t rest = pending; rest; rest &= rest - 1) {
    const int i = std::countr_zero(rest);
    if (!same_destination(first, products[i])) continue;
    pending &= ~(uint64_t(1) << i);
    add_product(d, products[i]);
  }
  store_floats(d, first.d);
}

template <float (*kWiden)(uint16_t), uint16_t (*kNarrow)(float)>
SIM_INLINE void add_to_narrow(const MatrixProduct& product) {
  Matrix d;
  load_narrow<kWiden>(d, product.d);
  add_product(d, product);
  store_narrow<kNarrow>(d, product.d);
}

SIM_INLINE void evaluate(const MatrixProduct* products, uint32_t count) {
  uint64_t pending = count < 64 ? (uint64_t(1) << count) - 1 : ~uint64_t(0);
  while (pending) {
    const MatrixProduct& first = products[std::countr_zero(pending)];
    if (first.d_type == kFloat32) {
      add_to_floats(products, pending);
      continue;
    }
    if (first.d_type == kFloat16) add_to_narrow<float_from_half, half_from_float>(first);
    if (first.d_type == kBFloat16) add_to_narrow<float_from_bfloat, bfloat_from_float>(first);
    pending &= pending - 1;
  }
}

void evaluate_baseline(const MatrixProduct* products, uint32_t count) {
  evaluate(products, count);
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void evaluate_avx2(const MatrixProduct* products,
                                                       uint32_t count) {
  evaluate(products, count);
}

__attribute__((target("avx512f,avx512vl,avx512dq,fma"))) void evaluate_avx512(
    const MatrixProduct* products, uint32_t count) {
  evaluate(products, count);
}

auto choose() {
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    return evaluate_avx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return evaluate_avx2;
  return evaluate_baseline;
}
#else
auto choose() {
  return evaluate_baseline;
}
#endif

}  // namespace

static_assert(kMatrixLogCapacity <= 64, "evaluate() keeps the pending products in 64 bits");

void evaluate_matrix_log(const MatrixProduct* products, uint32_t count) {
  static const auto chosen = choose();
  chosen(products, count);
}

}  // namespace sim
