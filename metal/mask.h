// Which (query, key) pairs are visible: the band of causal masks and windows, the end of the
// sequence, the boolean mask; and from these which K blocks a tile of queries has to visit.
#pragma once

#include "attn_params.h"
#include "tile.h"

namespace flash_mps {

constant int mask_kind [[function_constant(kMaskKindConstant)]];
constant bool has_mask = mask_kind != kNoMask;

// Keys begin <= j < end.
struct KeyRange {
  int begin;
  int end;
};

// Keys that at least one of the queries first ... last sees.
inline KeyRange keys_seen_by_any(constant AttnParams& params, int first, int last) {
  KeyRange keys;
  keys.begin = metal::max(0, metal::min(params.seqlen_k, first + params.band_begin));
  keys.end = metal::max(0, metal::min(params.seqlen_k, last + params.band_end));
  return keys;
}

// Keys that every one of the queries first ... last sees.
inline KeyRange keys_seen_by_all(constant AttnParams& params, int first, int last) {
  KeyRange keys;
  keys.begin = metal::max(0, metal::min(params.seqlen_k, last + params.band_begin));
  keys.end = metal::max(0, metal::min(params.seqlen_k, first + params.band_end));
  return keys;
}

inline int64_t mask_offset(constant AttnParams& params, int q_idx, int k_idx) {
  return q_idx * params.mask_stride_q + k_idx * params.mask_stride_k;
}

// First byte of one batch entry and head of the mask, whose elements have the kind's size.
template <typename T>
inline const device uchar* mask_plane(
    constant AttnParams& params, const device uchar* mask, int batch_idx, int head_idx) {
  const int64_t element_bytes =
      mask_kind == kBoolMask ? 1 : (mask_kind == kSameMask ? int64_t(sizeof(T)) : 4);
  return mask +
         element_bytes * (batch_idx * params.mask_stride_b + head_idx * params.mask_stride_h);
}

// Hides keys from one row of S and returns the keys of the block, one bit each, that any row of the
// simdgroup sees. `mask` is a mask_plane().
template <int COUNT>
inline uint apply_visibility(
    thread Strip<float, COUNT>& S,
    constant AttnParams& params,
    const device uchar* mask,
    int q_idx,
    int k_start,
    LanePosition at) {
  const KeyRange keys = keys_seen_by_any(params, q_idx, q_idx);
  uint seen = 0;
  FLASH_MPS_UNROLL
  for (int j = 0; j < COUNT; ++j) {
    float2 s = elements(S.fragments[j]);
    for (int i = 0; i < 2; ++i) {
      const int column = j * kFragment + at.column + i;
      const int k_idx = k_start + column;
      bool visible = q_idx < params.seqlen_q && k_idx >= keys.begin && k_idx < keys.end;
      if (mask_kind == kBoolMask && visible) {
        visible = mask[mask_offset(params, q_idx, k_idx)] != 0;
      }
      s[i] = visible ? s[i] : -INFINITY;
      seen |= s[i] == -INFINITY ? 0u : 1u << uint(column);
    }
    elements(S.fragments[j]) = s;
  }
  return metal::simd_or(seen);
}

}  // namespace flash_mps
