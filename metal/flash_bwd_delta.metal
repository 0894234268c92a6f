// flash_bwd_delta: delta = rowsum(dO · O) - dlse, the term that dS = P (dP - delta) subtracts. The gradient
// of lse joins here, because d lse / dS = P.
//
//   for each row, one simdgroup:
//     delta = Σ_d dO[d] O[d]
//     delta = delta - dlse
//
// Grid: (row blocks of 4, query heads, batch). Threadgroup: 4 simdgroups. No threadgroup memory.
// dO may have any strides, zeros included. Launched by csrc/flash_bwd.cpp.

#include "attn_params.h"
#include "tile.h"

namespace flash_mps {

constant bool has_dlse [[function_constant(kHasLseConstant)]];

template <typename T>
[[kernel]] void flash_bwd_delta(
    const device T* out [[buffer(kOutBuffer)]],
    const device T* dout [[buffer(kDOutBuffer)]],
    constant AttnBwdParams& params [[buffer(kParamsBuffer)]],
    device float* delta [[buffer(kDeltaBuffer)]],
    const device float* dlse [[buffer(kDLseBuffer), function_constant(has_dlse)]],
    uint3 block [[threadgroup_position_in_grid]],
    uint simdgroup_idx [[simdgroup_index_in_threadgroup]],
    uint num_simdgroups [[simdgroups_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const int batch_idx = int(block.z);
  const int head_idx = int(block.y);
  const int q_idx = int(block.x * num_simdgroups + simdgroup_idx);
  if (q_idx >= params.fwd.seqlen_q) {
    return;
  }
  const device T* O_row = out + batch_idx * params.fwd.out_stride_b +
                          head_idx * params.fwd.out_stride_h + q_idx * params.fwd.out_stride_s;
  const device T* dO_row = dout + batch_idx * params.dout_stride_b +
                           head_idx * params.dout_stride_h + q_idx * params.dout_stride_s;
  float sum = 0.0f;
  for (int d = int(lane); d < params.fwd.head_dim_v; d += kSimdWidth) {
    sum += float(dO_row[d * params.dout_stride_d]) * float(O_row[d]);
  }
  sum = metal::simd_sum(sum);
  if (lane == 0) {
    const int64_t row =
        (int64_t(batch_idx) * params.fwd.num_heads_q + head_idx) * params.fwd.seqlen_q + q_idx;
    delta[row] = has_dlse ? sum - dlse[row] : sum;
  }
}

}  // namespace flash_mps
