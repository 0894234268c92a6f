// What happens to a score between q.k and the softmax, forward and (later) its derivative next to it.
// Scores are in base 2: natural scores times log2(e).
#pragma once

#include "attn_params.h"
#include "mask.h"
#include "tile.h"

namespace flash_mps {

constant constexpr float kLog2e = 1.44269504088896340736f;
constant constexpr float kLowestFloat = -3.402823466e+38f;

// score + bias, where a finite bias stays finite in base 2: only -inf hides a key.
inline float add_bias(float score, float bias) {
  const float sum = score + bias * kLog2e;
  return bias == -INFINITY ? -INFINITY : metal::select(sum, kLowestFloat, sum < kLowestFloat);
}

// S = S * scale + float mask, for one row. `mask` is a mask_plane().
template <typename T, int COUNT>
inline void score_fwd(
    thread Strip<float, COUNT>& S,
    constant AttnParams& params,
    const device uchar* mask,
    int q_idx,
    int k_start,
    LanePosition at) {
  FLASH_MPS_UNROLL
  for (int j = 0; j < COUNT; ++j) {
    float2 s = elements(S.fragments[j]) * params.softmax_scale_log2;
    if (mask_kind == kSameMask || mask_kind == kFloatMask) {
      for (int i = 0; i < 2; ++i) {
        const int k_idx = k_start + j * kFragment + at.column + i;
        if (q_idx < params.seqlen_q && k_idx < params.seqlen_k) {
          const int64_t offset = mask_offset(params, q_idx, k_idx);
          const float bias = mask_kind == kSameMask
                                 ? float(reinterpret_cast<const device T*>(mask)[offset])
                                 : reinterpret_cast<const device float*>(mask)[offset];
          s[i] = add_bias(s[i], bias);
        }
      }
    }
    elements(S.fragments[j]) = s;
  }
}

}  // namespace flash_mps
