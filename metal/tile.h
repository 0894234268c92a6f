// 8x8 simdgroup fragments and rows of them: load, store, reduce. Knows nothing of attention.
//
// Lane l with bits b4..b0 holds two adjacent elements of a fragment: row 4*b4 + 2*b2 + b1, columns
// c and c + 1 with c = 4*b3 + 2*b0. The four lanes of a row differ in bits 0 and 3 only, so a row
// reduction is two shuffles.
#pragma once

#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
#include <metal_stdlib>

namespace flash_mps {

#define FLASH_MPS_UNROLL _Pragma("clang loop unroll(full)")

constant constexpr int kFragment = 8;
constant constexpr int kSimdWidth = 32;
constant constexpr int kWideBytes = 16;

template <typename T>
using Fragment = metal::simdgroup_matrix<T, kFragment, kFragment>;

// The two elements of a fragment that this lane holds.
template <typename T>
inline thread metal::vec<T, 2>& elements(thread Fragment<T>& fragment) {
  return reinterpret_cast<thread metal::vec<T, 2>&>(fragment.thread_elements());
}

// COUNT fragments side by side: an 8-row strip of a tile.
template <typename T, int COUNT>
struct Strip {
  Fragment<T> fragments[COUNT];
};

struct LanePosition {
  int row;
  int column;
};

inline LanePosition lane_position(uint lane) {
  LanePosition position;
  position.row = int(((lane >> 4) & 1) * 4 + ((lane >> 2) & 1) * 2 + ((lane >> 1) & 1));
  position.column = int(((lane >> 3) & 1) * 4 + (lane & 1) * 2);
  return position;
}

inline float row_max(float value) {
  value = metal::max(value, metal::simd_shuffle_xor(value, ushort(1)));
  return metal::max(value, metal::simd_shuffle_xor(value, ushort(8)));
}

inline float row_sum(float value) {
  value += metal::simd_shuffle_xor(value, ushort(1));
  return value + metal::simd_shuffle_xor(value, ushort(8));
}

// The sums over the 8 rows, for the lane's two columns.
inline float2 column_sum(float2 value) {
  value += metal::simd_shuffle_xor(value, ushort(2));
  value += metal::simd_shuffle_xor(value, ushort(4));
  return value + metal::simd_shuffle_xor(value, ushort(16));
}

// Reads the 8x8 elements at `source`, 0 beyond the first `rows` rows and `columns` columns.
template <typename T, typename Source>
inline void load_fragment(
    thread Fragment<T>& fragment, Source source, int64_t stride, int rows, int columns, uint lane) {
  if (rows >= kFragment && columns >= kFragment) {
    metal::simdgroup_load(fragment, source, ulong(stride));
    return;
  }
  const LanePosition at = lane_position(lane);
  for (int i = 0; i < 2; ++i) {
    const bool inside = at.row < rows && at.column + i < columns;
    elements(fragment)[i] = inside ? source[at.row * stride + at.column + i] : T(0);
  }
}

// The transpose of the 8x8 elements at `source`: 0 beyond the first `rows` rows and `columns`
// columns of the source.
template <typename T, typename Source>
inline void load_fragment_transposed(
    thread Fragment<T>& fragment, Source source, int64_t stride, int rows, int columns, uint lane) {
  if (rows >= kFragment && columns >= kFragment) {
    metal::simdgroup_load(fragment, source, ulong(stride), ulong2(0, 0), true);
    return;
  }
  const LanePosition at = lane_position(lane);
  for (int i = 0; i < 2; ++i) {
    const bool inside = at.column + i < rows && at.row < columns;
    elements(fragment)[i] = inside ? source[(at.column + i) * stride + at.row] : T(0);
  }
}

// S += A Bᵀ, where B is the COUNT * 8 rows and 8 columns at `source`: 0 beyond the first `rows` rows and
// `columns` columns.
template <typename T, int COUNT, typename Source>
inline void multiply_transposed(
    thread Strip<float, COUNT>& S,
    thread Fragment<T>& A,
    Source source,
    int64_t stride,
    int rows,
    int columns,
    uint lane) {
  FLASH_MPS_UNROLL
  for (int j = 0; j < COUNT; ++j) {
    const int row = j * kFragment;
    Fragment<T> B;
    load_fragment_transposed(B, source + row * stride, stride, rows - row, columns, lane);
    metal::simdgroup_multiply_accumulate(S.fragments[j], A, B, S.fragments[j]);
  }
}

// O += P V, where V is the COUNT * 8 rows and 8 columns at `source`: 0 beyond the first `rows` rows and
// `columns` columns, and in rows whose bit of `kept_rows` is 0. What such a row holds, NaN included,
// never meets a weight.
template <typename T, int COUNT, typename Source>
inline void multiply(
    thread Fragment<float>& O,
    thread Strip<float, COUNT>& P,
    Source source,
    int64_t stride,
    int rows,
    int columns,
    uint kept_rows,
    uint lane) {
  FLASH_MPS_UNROLL
  for (int j = 0; j < COUNT; ++j) {
    const int row = j * kFragment;
    Fragment<T> V;
    load_fragment(V, source + row * stride, stride, rows - row, columns, lane);
    if (kept_rows != ~0u && ((kept_rows >> uint(row + lane_position(lane).row)) & 1u) == 0u) {
      elements(V) = metal::vec<T, 2>(T(0));
    }
    metal::simdgroup_multiply_accumulate(O, P.fragments[j], V, O);
  }
}

template <typename T, int COUNT>
inline void fill(thread Strip<T, COUNT>& strip, T value) {
  FLASH_MPS_UNROLL
  for (int j = 0; j < COUNT; ++j) {
    strip.fragments[j] = metal::make_filled_simdgroup_matrix<T, kFragment, kFragment>(value);
  }
}

// A += B
template <int COUNT>
inline void add(thread Strip<float, COUNT>& A, thread Strip<float, COUNT>& B) {
  FLASH_MPS_UNROLL
  for (int j = 0; j < COUNT; ++j) {
    elements(A.fragments[j]) += elements(B.fragments[j]);
  }
}

// Writes the first `rows` rows and `columns` columns, rounded to T.
template <typename T>
inline void store_fragment(
    thread Fragment<float>& fragment,
    device T* out,
    int64_t stride,
    int rows,
    int columns,
    uint lane) {
  const LanePosition at = lane_position(lane);
  for (int i = 0; i < 2; ++i) {
    if (at.row < rows && at.column + i < columns) {
      out[at.row * stride + at.column + i] = T(elements(fragment)[i]);
    }
  }
}

// Reads the first `rows` rows and `columns` columns of a strip, 0 beyond.
template <typename T, int COUNT, typename Source>
inline void load_strip(
    thread Strip<T, COUNT>& strip,
    Source source,
    int64_t stride,
    int rows,
    int columns,
    uint lane) {
  FLASH_MPS_UNROLL
  for (int j = 0; j < COUNT; ++j) {
    const int column = j * kFragment;
    load_fragment(strip.fragments[j], source + column, stride, rows, columns - column, lane);
  }
}

// Writes the first `rows` rows and `columns` columns of a strip times `factor`, rounded to T once.
template <typename T, int COUNT>
inline void store_strip(
    thread Strip<float, COUNT>& strip,
    float factor,
    device T* out,
    int64_t stride,
    int rows,
    int columns,
    uint lane) {
  FLASH_MPS_UNROLL
  for (int j = 0; j < COUNT; ++j) {
    const int column = j * kFragment;
    elements(strip.fragments[j]) *= factor;
    store_fragment(strip.fragments[j], out + column, stride, rows, columns - column, lane);
  }
}

// Copies ROWS x COLUMNS elements to a threadgroup tile whose rows are PITCH elements apart, 0 beyond
// the first `rows` rows and `columns` columns. All THREADS threads of the threadgroup take part.
template <typename T, int ROWS, int COLUMNS, int PITCH, int THREADS>
inline void stage_tile(
    threadgroup T* tile,
    const device T* source,
    int64_t stride,
    int rows,
    int columns,
    bool is_wide,
    uint thread_idx) {
  constexpr int kWidth = kWideBytes / int(sizeof(T));
  if (is_wide) {
    constexpr int kWideColumns = COLUMNS / kWidth;
    for (int i = int(thread_idx); i < ROWS * kWideColumns; i += THREADS) {
      const int row = i / kWideColumns;
      const int column = (i % kWideColumns) * kWidth;
      const bool inside = row < rows && column < columns;
      threadgroup uint4* to = reinterpret_cast<threadgroup uint4*>(tile + row * PITCH + column);
      *to = inside ? *reinterpret_cast<const device uint4*>(source + row * stride + column)
                   : uint4(0);
    }
    return;
  }
  for (int i = int(thread_idx); i < ROWS * COLUMNS; i += THREADS) {
    const int row = i / COLUMNS;
    const int column = i % COLUMNS;
    const bool inside = row < rows && column < columns;
    tile[row * PITCH + column] = inside ? source[row * stride + column] : T(0);
  }
}

// Copies COUNT numbers to threadgroup memory, 0 beyond the first `count`. The first COUNT threads do it.
template <int COUNT>
inline void stage_numbers(
    threadgroup float* tile, const device float* source, int count, uint thread_idx) {
  const int i = int(thread_idx);
  if (i < COUNT) {
    tile[i] = i < count ? source[i] : 0.0f;
  }
}

}  // namespace flash_mps
