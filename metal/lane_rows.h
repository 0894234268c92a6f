// Rows that are split over the lanes of a simdgroup, in words of 16 bytes: LANES lanes hold one row, so
// a simdgroup reads 32 / LANES rows at a time. Knows nothing of attention.
//
// Lane i of a row holds words i, LANES + i, 2 * LANES + i, ...: neighbouring lanes read neighbouring
// words.
#pragma once

#include "tile.h"

namespace flash_mps {

// The elements in 4 bytes.
template <typename T>
inline void unpack(uint bits, thread T* elements) {
  const metal::vec<T, 2> pair = as_type<metal::vec<T, 2>>(bits);
  elements[0] = pair[0];
  elements[1] = pair[1];
}

inline void unpack(uint bits, thread float* elements) {
  elements[0] = as_type<float>(bits);
}

inline void unpack(uint bits, thread char* elements) {
  const char4 four = as_type<char4>(bits);
  FLASH_MPS_UNROLL
  for (int i = 0; i < 4; ++i) {
    elements[i] = four[i];
  }
}

// The first COUNT elements of a word.
template <int COUNT, typename T>
inline void unpack_word(uint4 word, thread T* elements) {
  constexpr int kPart = 4 / int(sizeof(T));
  FLASH_MPS_UNROLL
  for (int i = 0; i < COUNT / kPart; ++i) {
    unpack(word[i], elements + i * kPart);
  }
}

// Elements `column` ... of `row`, as many as a word has; 0 from `columns` on. A wide row starts on 16
// bytes and is a multiple of 16 bytes long.
template <typename T>
inline void load_word(
    thread T* elements, const device T* row, int column, int columns, bool is_wide) {
  constexpr int kElements = kWideBytes / int(sizeof(T));
  if (is_wide && column < columns) {
    unpack_word<kElements>(*reinterpret_cast<const device uint4*>(row + column), elements);
    return;
  }
  FLASH_MPS_UNROLL
  for (int i = 0; i < kElements; ++i) {
    elements[i] = column + i < columns ? row[column + i] : T(0);
  }
}

// COUNT elements of a staged row, 8 or 16 bytes of it; zeros, and nothing read, unless wanted.
template <int COUNT, typename T>
inline void load_tile(thread T* elements, const threadgroup T* source, bool is_wanted) {
  uint4 word = uint4(0);
  if (is_wanted && COUNT * int(sizeof(T)) == kWideBytes) {
    word = *reinterpret_cast<const threadgroup uint4*>(source);
  } else if (is_wanted) {
    word.xy = *reinterpret_cast<const threadgroup uint2*>(source);
  }
  unpack_word<COUNT>(word, elements);
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

// Of the numbers at first, first + stride, ...: one for each simdgroup that shares a row.
inline float max_over_slices(const threadgroup float* numbers, int first, int stride, int count) {
  float most = numbers[first];
  for (int i = 1; i < count; ++i) {
    most = metal::max(most, numbers[first + i * stride]);
  }
  return most;
}

inline float sum_over_slices(const threadgroup float* numbers, int first, int stride, int count) {
  float sum = numbers[first];
  for (int i = 1; i < count; ++i) {
    sum += numbers[first + i * stride];
  }
  return sum;
}

}  // namespace flash_mps
