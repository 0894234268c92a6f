// The running softmax of one score row, in base 2 (Milakov and Gimelshein 2018, "Online normalizer
// calculation for softmax"): m is the running maximum, l the running sum of exp2(s - m).
//
// m is the same in the four lanes of a row. l holds only the lane's own columns until finalise().
#pragma once

#include "tile.h"

namespace flash_mps {

constant constexpr float kNegativeInfinity = -INFINITY;
constant constexpr float kLn2 = 0.693147180559945309f;

struct SoftmaxState {
  float m;
  float l;
};

inline SoftmaxState softmax_init() {
  SoftmaxState state;
  state.m = kNegativeInfinity;
  state.l = 0.0f;
  return state;
}

// What is subtracted from a score: -inf only when the row has seen no key, where every exp2 is to be 0
// and -inf - -inf would be NaN.
inline float softmax_shift(float m) {
  return m == kNegativeInfinity ? 0.0f : m;
}

// S becomes P = exp2(S - m) with the new maximum; returns the factor that rescales O.
template <int COUNT>
inline float softmax_update(thread SoftmaxState& state, thread Strip<float, COUNT>& S) {
  float block_max = kNegativeInfinity;
  FLASH_MPS_UNROLL
  for (int j = 0; j < COUNT; ++j) {
    const float2 s = elements(S.fragments[j]);
    block_max = metal::max(block_max, metal::max(s.x, s.y));
  }
  const float m = metal::max(state.m, row_max(block_max));
  const float shift = softmax_shift(m);
  const float rescale = metal::fast::exp2(state.m - shift);
  float sum = 0.0f;
  FLASH_MPS_UNROLL
  for (int j = 0; j < COUNT; ++j) {
    const float2 p = metal::fast::exp2(elements(S.fragments[j]) - shift);
    elements(S.fragments[j]) = p;
    sum += p.x + p.y;
  }
  state.l = state.l * rescale + sum;
  state.m = m;
  return rescale;
}

// Sums l over the row's lanes.
inline void softmax_finalise(thread SoftmaxState& state) {
  state.l = row_sum(state.l);
}

// 1 / l; 0 for a row that saw no key, whose output is 0.
inline float softmax_normaliser(SoftmaxState state) {
  return state.l == 0.0f ? 0.0f : 1.0f / state.l;
}

// Natural logarithm of the row's sum of exp(score); -inf for a row that saw no key.
inline float softmax_lse(SoftmaxState state) {
  return state.l == 0.0f ? kNegativeInfinity : (state.m + metal::log2(state.l)) * kLn2;
}

}  // namespace flash_mps
