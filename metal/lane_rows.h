// Rows that are split over the lanes of a simdgroup, in words of 16 bytes: LANES lanes hold one row, so
// a simdgroup reads 32 / LANES rows at a time. Knows nothing of attention.
//
// Lane i of a row holds words i, LANES + i, 2 * LANES + i, ...: neighbouring lanes read neighbouring
// words.
#pragma once

#include "tile.h"

namespace flash_mps {

// The elements of a word.
template <typename T>
inline void unpack(uint4 word, thread T* elements) {
  FLASH_MPS_UNROLL
  for (int i = 0; i < 4; ++i) {
    const metal::vec<T, 2> pair = as_type<metal::vec<T, 2>>(word[i]);
    elements[2 * i] = pair[0];
    elements[2 * i + 1] = pair[1];
  }
}

inline void unpack(uint4 word, thread float* elements) {
  FLASH_MPS_UNROLL
  for (int i = 0; i < 4; ++i) {
    elements[i] = as_type<float>(word[i]);
  }
}

inline void unpack(uint4 word, thread char* elements) {
  FLASH_MPS_UNROLL
  for (int i = 0; i < 4; ++i) {
    const char4 four = as_type<char4>(word[i]);
    FLASH_MPS_UNROLL
    for (int j = 0; j < 4; ++j) {
      elements[4 * i + j] = four[j];
    }
  }
}

// Elements `column` ... of `row`, as many as a word has; 0 from `columns` on. A wide row starts on 16
// bytes and is a multiple of 16 bytes long.
template <typename T>
inline void load_word(
    thread T* elements, const device T* row, int column, int columns, bool is_wide) {
  if (is_wide && column < columns) {
    unpack(*reinterpret_cast<const device uint4*>(row + column), elements);
    return;
  }
  FLASH_MPS_UNROLL
  for (int i = 0; i < kWideBytes / int(sizeof(T)); ++i) {
    elements[i] = column + i < columns ? row[column + i] : T(0);
  }
}

// a . b over the COUNT elements that this lane holds; summed in float32.
template <int COUNT, typename A, typename B>
inline float dot_elements(const thread A* a, const thread B* b) {
  float sum = 0.0f;
  FLASH_MPS_UNROLL
  for (int i = 0; i < COUNT; ++i) {
    sum = metal::fma(float(a[i]), float(b[i]), sum);
  }
  return sum;
}

// sum += factor * elements, over the COUNT elements that this lane holds.
template <int COUNT, typename T>
inline void add_elements(thread float* sum, float factor, const thread T* elements) {
  FLASH_MPS_UNROLL
  for (int i = 0; i < COUNT; ++i) {
    sum[i] = metal::fma(factor, float(elements[i]), sum[i]);
  }
}

// The sum over the lanes of a row, in all of them.
template <int LANES>
inline float sum_over_lanes(float value) {
  FLASH_MPS_UNROLL
  for (int step = 1; step < LANES; step *= 2) {
    value += metal::simd_shuffle_xor(value, ushort(step));
  }
  return value;
}

// LANES for rows of up to WORDS words.
template <int WORDS>
inline constexpr int lanes_per_row() {
  return WORDS > 16 ? 32 : (WORDS > 8 ? 16 : (WORDS > 4 ? 8 : (WORDS > 2 ? 4 : WORDS)));
}

}  // namespace flash_mps
