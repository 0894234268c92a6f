// flash_decode_combine: merges the partial results of the splits of flash_decode.
//
//   m' = max m; w = exp(m - m')         of each split
//   out = sum w·O / sum w·l; lse = m' + log sum w·l
//
// Grid: (rows, 1, 1), a row being one query of one head. Threadgroup: one simdgroup, lanes split
// head_dim_v. Threadgroup memory: a weight for each split. Launched by csrc/flash_decode.cpp.

#include "attn_params.h"
#include "instances.h"
#include "online_softmax.h"

namespace flash_mps {

constant bool has_lse [[function_constant(kHasLseConstant)]];
constant bool has_sinks [[function_constant(kHasSinksConstant)]];

template <typename T>
[[kernel]] void flash_decode_combine(
    device T* out [[buffer(kOutBuffer)]],
    constant AttnCombineParams& params [[buffer(kParamsBuffer)]],
    device float* lse [[buffer(kLseBuffer), function_constant(has_lse)]],
    const device float* sinks [[buffer(kSinksBuffer), function_constant(has_sinks)]],
    const device float* partial [[buffer(kPartialBuffer)]],
    uint block [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float weights[FLASH_DECODE_MAX_SPLITS];
  const int row = int(block);
  const device float* m_and_l =
      partial + int64_t(params.num_splits) * params.num_rows * params.head_dim_v;

  // m' = max m; w = exp(m - m')
  float m = kNegativeInfinity;
  for (int split = int(lane); split < params.num_splits; split += kSimdWidth) {
    const int64_t slot = int64_t(split) * params.num_rows + row;
    weights[split] = m_and_l[2 * slot];
    m = metal::max(m, weights[split]);
  }
  SoftmaxState state;
  state.m = metal::simd_max(m);
  state.l = 0.0f;
  for (int split = int(lane); split < params.num_splits; split += kSimdWidth) {
    const int64_t slot = int64_t(split) * params.num_rows + row;
    weights[split] = softmax_exp(weights[split], softmax_shift(state.m));
    state.l += weights[split] * m_and_l[2 * slot + 1];
  }
  state.l = metal::simd_sum(state.l);
  // Every lane reads all weights.
  metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);

  // out = sum w·O / sum w·l; lse = m' + log sum w·l; a sink counts once, here
  const int q_idx = row % params.seqlen_q;
  const int head_idx = row / params.seqlen_q % params.num_heads_q;
  const int batch_idx = row / params.seqlen_q / params.num_heads_q;
  const float rescale = has_sinks ? softmax_add_sink(state, sinks[head_idx]) : 1.0f;
  device T* out_row = out + batch_idx * params.out_stride_b + head_idx * params.out_stride_h +
                      q_idx * params.out_stride_s;
  for (int column = int(lane); column < params.head_dim_v; column += kSimdWidth) {
    float sum = 0.0f;
    for (int split = 0; split < params.num_splits; ++split) {
      const int64_t slot = int64_t(split) * params.num_rows + row;
      sum += weights[split] * partial[slot * params.head_dim_v + column];
    }
    out_row[column] = T(sum * rescale * softmax_normaliser(state));
  }
  if (has_lse && lane == 0) {
    lse[row] = softmax_lse(state);
  }
}

}  // namespace flash_mps
