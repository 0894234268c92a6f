// What happens to a score between q.k and the softmax, forward and (later) its derivative next to it.
#pragma once

#include "attn_params.h"
#include "mask.h"
#include "tile.h"

namespace flash_mps {

constant constexpr float kLowestFloat = -3.402823466e+38f;

// score + bias, where a finite bias leaves a finite score: only -inf hides a key.
inline float add_bias(float score, float bias) {
  const float sum = score + bias;
  return bias == -INFINITY ? -INFINITY : metal::select(sum, kLowestFloat, sum < kLowestFloat);
}

// An element of the mask as what is added to a score: 0 or -inf where the mask is boolean. `plane` is a
// mask_plane().
template <typename T>
inline float mask_bias(const device uchar* plane, int64_t offset) {
  if (mask_kind == kBoolMask) {
    return plane[offset] != 0 ? 0.0f : -INFINITY;
  }
  return mask_kind == kSameMask ? float(reinterpret_cast<const device T*>(plane)[offset])
                                : reinterpret_cast<const device float*>(plane)[offset];
}

// A product q.k becomes a score.
inline float score_fwd(float product, constant AttnParams& params, float bias) {
  return add_bias(product * params.softmax_scale, bias);
}

// S = S * scale + float mask. `plane` is a mask_plane().
template <typename T, bool TRANSPOSED, int COUNT>
inline void score_fwd(
    thread Strip<float, COUNT>& S,
    constant AttnParams& params,
    const device uchar* plane,
    int q_start,
    int k_start,
    LanePosition at) {
  FLASH_MPS_UNROLL
  for (int j = 0; j < COUNT; ++j) {
    float2 s = elements(S.fragments[j]) * params.softmax_scale;
    if (mask_kind == kSameMask || mask_kind == kFloatMask) {
      for (int i = 0; i < 2; ++i) {
        const ScorePosition position = score_position<TRANSPOSED>(q_start, k_start, at, j, i);
        if (position.q_idx < params.seqlen_q && position.k_idx < params.seqlen_k) {
          s[i] = add_bias(s[i], mask_bias<T>(plane, mask_offset(params, position)));
        }
      }
    }
    elements(S.fragments[j]) = s;
  }
}

}  // namespace flash_mps
