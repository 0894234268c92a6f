// 16 bytes of a row in the registers of one lane, as float32. Knows nothing of what the row is.
#pragma once

#include <metal_stdlib>

#include "lane_rows.h"

namespace flash_mps {

template <typename T>
constant constexpr int kChunkWidth = kWideBytes / int(sizeof(T));

template <typename T>
struct RowChunk {
  float values[kChunkWidth<T>];
};

template <typename T>
union WideChunk {
  uint4 words;
  T elements[kChunkWidth<T>];
};

union Int8Chunk {
  uint words[2];
  char elements[8];
};

// The elements from d on, 0 beyond head_dim.
template <typename T>
inline RowChunk<T> load_chunk(const device T* row, int d, int head_dim, bool is_wide) {
  T elements[kChunkWidth<T>];
  load_word(elements, row, d, head_dim, is_wide);
  RowChunk<T> chunk;
  FLASH_MPS_UNROLL
  for (int i = 0; i < kChunkWidth<T>; ++i) {
    chunk.values[i] = float(elements[i]);
  }
  return chunk;
}

// Writes the elements below head_dim, rounded to T.
template <typename T>
inline void store_chunk(RowChunk<T> chunk, device T* row, int d, int head_dim, bool is_wide) {
  if (is_wide) {
    WideChunk<T> wide;
    FLASH_MPS_UNROLL
    for (int i = 0; i < kChunkWidth<T>; ++i) {
      wide.elements[i] = T(chunk.values[i]);
    }
    *reinterpret_cast<device uint4*>(row + d) = wide.words;
    return;
  }
  for (int i = 0; i < kChunkWidth<T> && d + i < head_dim; ++i) {
    row[d + i] = T(chunk.values[i]);
  }
}

// Writes the elements below head_dim as 8-bit integers; they are integers of that range.
template <typename T>
inline void store_int8_chunk(
    RowChunk<T> chunk, device char* row, int d, int head_dim, bool is_wide) {
  Int8Chunk narrow;
  FLASH_MPS_UNROLL
  for (int i = 0; i < kChunkWidth<T>; ++i) {
    narrow.elements[i] = char(chunk.values[i]);
  }
  if (is_wide) {
    FLASH_MPS_UNROLL
    for (int i = 0; i < kChunkWidth<T> / 4; ++i) {
      reinterpret_cast<device uint*>(row + d)[i] = narrow.words[i];
    }
    return;
  }
  for (int i = 0; i < kChunkWidth<T> && d + i < head_dim; ++i) {
    row[d + i] = narrow.elements[i];
  }
}

}  // namespace flash_mps
