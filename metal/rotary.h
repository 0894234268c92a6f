// Rotary embedding (Su et al. 2021, "RoFormer"): pairs of elements of a row are turned by an angle that
// grows with the row's position.
#pragma once

#include "kv_cache_params.h"
#include "row_chunk.h"

namespace flash_mps {

constant bool has_seqlens [[function_constant(kHasSeqlensConstant)]];
constant bool has_leftpad [[function_constant(kHasLeftpadConstant)]];
constant bool has_rotary [[function_constant(kHasRotaryConstant)]];
constant bool is_interleaved [[function_constant(kIsInterleavedConstant)]];
constant bool has_float_table [[function_constant(kHasFloatTableConstant)]];

// Element `pair` of row `position` of a table.
template <typename T>
inline float table_value(const device uchar* table, int64_t position, int64_t stride, int pair) {
  const int64_t at = position * stride + pair;
  return has_float_table ? reinterpret_cast<const device float*>(table)[at]
                         : float(reinterpret_cast<const device T*>(table)[at]);
}

// Turns the elements from d on of a row at `position`. Before the first position nothing turns; beyond
// the tables no value is right, so there is none.
template <typename T>
inline void rotate_chunk(
    thread RowChunk<T>& chunk,
    const device T* row,
    int d,
    int64_t position,
    constant RotaryParams& params,
    const device uchar* cos,
    const device uchar* sin) {
  const int half_dim = params.rotary_dim / 2;
  for (int i = 0; i < kChunkWidth<T> && d + i < params.rotary_dim && position >= 0; ++i) {
    const int at = d + i;
    const bool is_second = is_interleaved ? (at & 1) != 0 : at >= half_dim;
    const int pair = is_interleaved ? at / 2 : (is_second ? at - half_dim : at);
    const int distance = is_interleaved ? 1 : half_dim;
    if (position >= params.seqlen_ro) {
      chunk.values[i] = NAN;
      continue;
    }
    const float partner = float(row[is_second ? at - distance : at + distance]);
    const float c = table_value<T>(cos, position, params.cos_stride_s, pair);
    const float s = table_value<T>(sin, position, params.sin_stride_s, pair);
    chunk.values[i] = chunk.values[i] * c + (is_second ? partner * s : -partner * s);
  }
}

}  // namespace flash_mps
