// P and dS of a strip, from the lse and delta of its queries (Dao 2023, "FlashAttention-2", algorithm
// 2): P = exp(S - lse), dS = P (dP - delta), delta = rowsum(dO O).
#pragma once

#include "online_softmax.h"
#include "score_mod.h"
#include "tile.h"

namespace flash_mps {

// One number for each column of a strip: the two columns of this lane in each fragment.
template <int COUNT>
struct ColumnValues {
  float2 columns[COUNT];
};

// The number of the lane's columns in fragment j, where a strip's rows are queries.
inline float2 query_values(float row, int) {
  return float2(row);
}

// The same where its columns are queries.
template <int COUNT>
inline float2 query_values(thread const ColumnValues<COUNT>& values, int j) {
  return values.columns[j];
}

// Reads `source` from the strip's first column on, 0 beyond `columns`.
template <int COUNT, typename Source>
inline void load_columns(
    thread ColumnValues<COUNT>& values, Source source, int columns, LanePosition at) {
  FLASH_MPS_UNROLL
  for (int j = 0; j < COUNT; ++j) {
    for (int i = 0; i < 2; ++i) {
      const int column = j * kFragment + at.column + i;
      values.columns[j][i] = column < columns ? source[column] : 0.0f;
    }
  }
}

// lse of each column becomes its softmax_shift().
template <int COUNT>
inline void shift_columns(thread ColumnValues<COUNT>& lse) {
  FLASH_MPS_UNROLL
  for (int j = 0; j < COUNT; ++j) {
    lse.columns[j] = float2(softmax_shift(lse.columns[j].x), softmax_shift(lse.columns[j].y));
  }
}

// S becomes P; `shift` is the softmax_shift() of each query's lse. A hidden pair, S = -inf, gives 0,
// also to a query whose lse is NaN.
template <int COUNT, typename Values>
inline void probabilities(thread Strip<float, COUNT>& S, thread const Values& shift) {
  FLASH_MPS_UNROLL
  for (int j = 0; j < COUNT; ++j) {
    const float2 s = elements(S.fragments[j]);
    const float2 p = softmax_exp(s, query_values(shift, j));
    elements(S.fragments[j]) = metal::select(p, float2(0.0f), s == float2(-INFINITY));
  }
}

// dP becomes dS. A pair without weight gets 0, whatever dP holds.
template <int COUNT, typename Values>
inline void softmax_bwd(
    thread Strip<float, COUNT>& dP, thread Strip<float, COUNT>& P, thread const Values& delta) {
  FLASH_MPS_UNROLL
  for (int j = 0; j < COUNT; ++j) {
    const float2 p = elements(P.fragments[j]);
    const float2 ds = p * (elements(dP.fragments[j]) - query_values(delta, j));
    elements(dP.fragments[j]) = metal::select(ds, float2(0.0f), p == float2(0.0f));
  }
}

}  // namespace flash_mps
