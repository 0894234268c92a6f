// What happens to a score between q.k and the softmax, in this order: scale, softcap, ALiBi, float mask,
// or scale and user-defined functions alone; and its derivative.
#pragma once

#include "attn_params.h"
#include "mask.h"
#include "tile.h"
#include "user_ops.h"
#include "user_score.h"

namespace flash_mps {

constant bool has_softcap [[function_constant(kHasSoftcapConstant)]];
constant bool has_alibi [[function_constant(kHasAlibiConstant)]];
constant bool has_bias = mask_kind == kSameMask || mask_kind == kFloatMask;

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

// What the modifiers of one head's scores read.
struct ScoreMod {
  HeadMask mask;
  float slope;  // of ALiBi (Press et al. 2022, "Train short, test long")
  UserCode user;
  int batch_idx;
  int head_idx;
};

// Buffers of every kernel that computes scores, and what it makes of them.
#define FLASH_MPS_SCORE_BUFFERS                                                  \
  const device uchar *mask [[buffer(kMaskBuffer), function_constant(has_mask)]], \
      const device uchar *block_classes                                          \
      [[buffer(kBlockClassesBuffer), function_constant(has_block_classes)]],     \
      const device float *alibi_slopes                                           \
      [[buffer(kAlibiBuffer), function_constant(has_alibi)]] FLASH_MPS_USER_BUFFERS
#define FLASH_MPS_SCORE_MOD(T, params, batch_idx, head_idx)                           \
  score_mod<T>(                                                                       \
      params, has_mask ? mask : nullptr, has_block_classes ? block_classes : nullptr, \
      has_alibi ? alibi_slopes : nullptr, FLASH_MPS_USER_CODE, batch_idx, head_idx)

template <typename T>
inline ScoreMod score_mod(
    constant AttnParams& params,
    const device uchar* mask,
    const device uchar* block_classes,
    const device float* alibi_slopes,
    UserCode user,
    int batch_idx,
    int head_idx) {
  ScoreMod mod;
  mod.user = user;
  mod.batch_idx = batch_idx;
  mod.head_idx = head_idx;
  mod.mask = head_mask<T>(params, mask, block_classes, batch_idx, head_idx);
  mod.slope = has_alibi ? alibi_slopes[batch_idx * params.alibi_stride_b + head_idx] : 0.0f;
  return mod;
}

// A score within the cap, and its derivative by the score before.
inline float softcap_fwd(constant AttnParams& params, float score) {
  return params.softcap * metal::precise::tanh(score / params.softcap);
}

inline float softcap_slope(constant AttnParams& params, float score) {
  const float t = metal::precise::tanh(score / params.softcap);
  return 1.0f - t * t;
}

inline float alibi_bias(float slope, int q_position, int k_idx) {
  return -slope * float(metal::abs(q_position - k_idx));
}

// What the user's functions make of a scaled score: -inf hides the pair. `is_open`: all pairs of the tile
// are visible.
inline float user_score_fwd(
    UserCode user, float score, bool is_open, int batch_idx, int head_idx, int q_idx, int k_idx) {
  if (has_user_mask && !is_open && !user_visible(user, batch_idx, head_idx, q_idx, k_idx)) {
    return -INFINITY;
  }
  return user_score(user, score, batch_idx, head_idx, q_idx, k_idx);
}

// A product q.k becomes a score; `bias` is what the mask adds.
inline float score_fwd(
    float product,
    constant AttnParams& params,
    float slope,
    float bias,
    int q_position,
    int k_idx) {
  float s = product * params.softmax_scale;
  if (has_softcap) {
    s = softcap_fwd(params, s);
  }
  if (has_alibi) {
    s += alibi_bias(slope, q_position, k_idx);
  }
  return has_bias ? add_bias(s, bias) : s;
}

// Products become scores.
template <typename T, bool TRANSPOSED, int COUNT>
inline void score_fwd(
    thread Strip<float, COUNT>& S,
    constant AttnParams& params,
    Band band,
    ScoreMod mod,
    int q_start,
    int k_start,
    LanePosition at) {
  FLASH_MPS_UNROLL
  for (int j = 0; j < COUNT; ++j) {
    float2 s = elements(S.fragments[j]);
    for (int i = 0; i < 2; ++i) {
      const ScorePosition position = score_position<TRANSPOSED>(q_start, k_start, at, j, i);
      float bias = 0.0f;
      const bool reads_bias = has_bias && mod.mask.tile_class != kOpenBlock;
      if (reads_bias && position.q_idx < band.seqlen_q && position.k_idx < band.seqlen_k) {
        bias = mask_bias<T>(mod.mask.plane, mask_offset(params, position));
      }
      s[i] = score_fwd(s[i], params, mod.slope, bias, position.q_idx + band.offset, position.k_idx);
      if (has_user_code) {
        s[i] = user_score_fwd(
            mod.user, s[i], mod.mask.tile_class == kOpenBlock, mod.batch_idx, mod.head_idx,
            position.q_idx, position.k_idx);
      }
    }
    elements(S.fragments[j]) = s;
  }
}

// The derivative of each score by its scaled product, from the products.
template <bool TRANSPOSED, int COUNT>
inline void score_slope(
    thread Strip<float, COUNT>& slope,
    thread Strip<float, COUNT>& S,
    constant AttnParams& params,
    ScoreMod mod,
    int q_start,
    int k_start,
    LanePosition at) {
  if (!has_softcap && !has_user_score) {
    return;
  }
  FLASH_MPS_UNROLL
  for (int j = 0; j < COUNT; ++j) {
    float2 s = elements(S.fragments[j]) * params.softmax_scale;
    for (int i = 0; i < 2; ++i) {
      const ScorePosition position = score_position<TRANSPOSED>(q_start, k_start, at, j, i);
      s[i] = has_user_score
                 ? user_slope(
                       mod.user, s[i], mod.batch_idx, mod.head_idx, position.q_idx, position.k_idx)
                 : softcap_slope(params, s[i]);
    }
    elements(slope.fragments[j]) = s;
  }
}

// The gradient of the scores becomes that of the scaled products. One of 0 stays 0, whatever its slope.
template <int COUNT>
inline void score_bwd(thread Strip<float, COUNT>& dS, thread Strip<float, COUNT>& slope) {
  if (!has_softcap && !has_user_score) {
    return;
  }
  FLASH_MPS_UNROLL
  for (int j = 0; j < COUNT; ++j) {
    const float2 ds = elements(dS.fragments[j]);
    elements(dS.fragments[j]) =
        metal::select(ds * elements(slope.fragments[j]), float2(0.0f), ds == float2(0.0f));
  }
}

}  // namespace flash_mps
