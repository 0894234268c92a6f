// The running softmax of one score row (Milakov and Gimelshein 2018, "Online normalizer calculation for
// softmax"): m is the running maximum, l the running sum of exp(s - m).
//
// m is the same in the four lanes of a row. l holds only the lane's own columns until
// softmax_finalise().
#pragma once

#include "tile.h"

namespace flash_mps {

constant constexpr float kNegativeInfinity = -INFINITY;
constant constexpr float kLog2e = 1.44269504088896340736f;

struct SoftmaxState {
  float m;
  float l;
};

// What is subtracted from a score. 0 for a row that has seen no key, where every exponential is to be
// 0 and -inf - -inf would be NaN.
inline float softmax_shift(float m) {
  return m == kNegativeInfinity ? 0.0f : m;
}

// exp(s - shift), as a power of 2, which the hardware has. The factor log2(e) comes after the
// subtraction: before it, it would round large scores once more.
inline float2 softmax_exp(float2 s, float2 shift) {
  return metal::fast::exp2((s - shift) * kLog2e);
}

inline float softmax_exp(float s, float shift) {
  return metal::fast::exp2((s - shift) * kLog2e);
}

inline SoftmaxState softmax_init() {
  SoftmaxState state;
  state.m = kNegativeInfinity;
  state.l = 0.0f;
  return state;
}

// Raises m to at least `block_max` and rescales l; returns the factor that rescales O.
inline float softmax_raise(thread SoftmaxState& state, float block_max) {
  const float m = metal::max(state.m, block_max);
  const float rescale = softmax_exp(state.m, softmax_shift(m));
  state.l *= rescale;
  state.m = m;
  return rescale;
}

// S becomes P = exp(S - m) with the new maximum; returns the factor that rescales O.
template <int COUNT>
inline float softmax_update(thread SoftmaxState& state, thread Strip<float, COUNT>& S) {
  float block_max = kNegativeInfinity;
  FLASH_MPS_UNROLL
  for (int j = 0; j < COUNT; ++j) {
    const float2 s = elements(S.fragments[j]);
    block_max = metal::max(block_max, metal::max(s.x, s.y));
  }
  const float rescale = softmax_raise(state, row_max(block_max));
  const float shift = softmax_shift(state.m);
  float sum = 0.0f;
  FLASH_MPS_UNROLL
  for (int j = 0; j < COUNT; ++j) {
    const float2 p = softmax_exp(elements(S.fragments[j]), float2(shift));
    elements(S.fragments[j]) = p;
    sum += p.x + p.y;
  }
  state.l += sum;
  return rescale;
}

// Sums l over the row's lanes.
inline void softmax_finalise(thread SoftmaxState& state) {
  state.l = row_sum(state.l);
}

// A sink joins the sum after all keys; returns the factor that rescales O.
inline float softmax_add_sink(thread SoftmaxState& state, float sink) {
  const float rescale = softmax_raise(state, sink);
  state.l += softmax_exp(sink, softmax_shift(state.m));
  return rescale;
}

// 1 / l; 0 for a row that saw no key, whose output is 0.
inline float softmax_normaliser(SoftmaxState state) {
  return state.l == 0.0f ? 0.0f : 1.0f / state.l;
}

// Natural logarithm of the row's sum of exp(score); -inf for a row that saw no key.
inline float softmax_lse(SoftmaxState state) {
  return state.l == 0.0f ? kNegativeInfinity : state.m + metal::log(state.l);
}

}  // namespace flash_mps
