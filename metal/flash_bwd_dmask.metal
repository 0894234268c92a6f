// flash_bwd_dmask: the gradient of a float mask (bias), summed over every dimension that it broadcasts.
// Each element has one owner, which goes through everything that the element was added to: no
// atomics, no [B, Hq, Sq, Sk] buffer.
//
//   dM = 0
//   for each batch entry, query head and Q strip that the mask's block stands for:
//     S = Q Kᵀ; S = score_fwd(S); hide keys; P = exp(S - lse)
//     dP = dO Vᵀ; dS = P (dP - delta)
//     dM = dM + dS
//   sum dM over its rows where the mask has one row
//
// A mask with one column needs no kernel (csrc/flash_bwd.cpp).
//
// Grid: (key blocks of the mask, query strips of the mask, batch entries · heads of the mask).
// Threadgroup: one simdgroup, 8 queries and BK keys. No threadgroup memory.
// Launched by csrc/flash_bwd.cpp.

#include "attn_params.h"
#include "tile.h"
#include "row_products.h"
#include "online_softmax.h"
#include "mask.h"
#include "score_mod.h"
#include "dropout.h"
#include "softmax_bwd.h"

namespace flash_mps {

// dM = dM + dS for the strip of queries first_row ... and the keys k_start ... of one head.
template <typename T, int D, int DV, int COUNT>
inline void add_mask_gradient(
    thread Strip<float, COUNT>& dM,
    const device T* Q_rows,
    const device T* dO_rows,
    const device T* K_rows,
    const device T* V_rows,
    constant AttnBwdParams& bwd,
    Band band,
    ScoreMod mod,
    Dropout dropout,
    float shift,
    float delta,
    int first_row,
    int k_start,
    uint lane) {
  constant AttnParams& params = bwd.fwd;
  const LanePosition at = lane_position(lane);
  const int rows = band.seqlen_q - first_row;
  const int keys = band.seqlen_k - k_start;
  Strip<float, COUNT> P;
  Strip<float, COUNT> dS;
  Strip<T, 1> A;
  multiply_rows<D, false, false>(
      P, A, Q_rows, params.q_stride_s, rows, K_rows, params.k_stride_s, keys, params.head_dim,
      lane);
  score_fwd<T, false>(P, params, band, mod, first_row, k_start, at);
  apply_visibility<false>(P, params, band, mod.mask, first_row, k_start, at);
  probabilities(P, shift);
  multiply_rows<DV, false, false>(
      dS, A, dO_rows, bwd.dout_stride_s, rows, V_rows, params.v_stride_s, keys, params.head_dim_v,
      lane);
  apply_dropout<false>(dS, params, dropout, first_row, k_start, at);
  softmax_bwd(dS, P, delta);
  add(dM, dS);
}

template <typename T, typename M, int D, int DV, int BK>
[[kernel]] void flash_bwd_dmask(
    const device T* query [[buffer(kQueryBuffer)]],
    const device T* key [[buffer(kKeyBuffer)]],
    const device T* value [[buffer(kValueBuffer)]],
    const device T* dout [[buffer(kDOutBuffer)]],
    const device float* lse [[buffer(kLseBuffer)]],
    const device float* delta [[buffer(kDeltaBuffer)]],
    device M* dmask [[buffer(kDMaskBuffer)]],
    constant AttnBwdParams& bwd [[buffer(kParamsBuffer)]],
    FLASH_MPS_SCORE_BUFFERS,
    uint3 block [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  constant AttnParams& params = bwd.fwd;
  constexpr int kCount = BK / kFragment;
  const LanePosition at = lane_position(lane);
  const Band band = band_of(params);

  // What the mask's block stands for: one index of each dimension, or all where it broadcasts.
  const bool all_batch = bwd.dmask_stride_b == 0;
  const bool all_heads = bwd.dmask_stride_h == 0;
  const bool all_rows = bwd.dmask_stride_q == 0;
  const int num_heads = all_heads ? 1 : params.num_heads_q;
  const int own_batch = int(block.z) / num_heads;
  const int own_head = int(block.z) % num_heads;
  const int own_row = int(block.y) * kFragment;
  const int k_start = int(block.x) * BK;

  Strip<float, kCount> dM;
  fill(dM, 0.0f);
  for (int b = all_batch ? 0 : own_batch; b < (all_batch ? bwd.batch : own_batch + 1); ++b) {
    for (int h = all_heads ? 0 : own_head; h < (all_heads ? params.num_heads_q : own_head + 1);
         ++h) {
      ScoreMod mod = FLASH_MPS_SCORE_MOD(T, params, b, h);
      const Dropout dropout = dropout_of(params, b, h);
      const int kv_head = h / params.group_size;
      const int64_t head_row = (int64_t(b) * params.num_heads_q + h) * params.seqlen_q;
      const int end_row = all_rows ? band.seqlen_q : metal::min(own_row + 1, band.seqlen_q);
      for (int row = all_rows ? 0 : own_row; row < end_row; row += kFragment) {
        mod.mask.tile_class = class_of_tile(params, mod.mask, row, k_start);
        if (mod.mask.tile_class == kHiddenBlock) {
          continue;
        }
        const bool is_row = row + at.row < band.seqlen_q;
        const float shift = is_row ? softmax_shift(lse[head_row + row + at.row]) : 0.0f;
        const float row_delta = is_row ? delta[head_row + row + at.row] : 0.0f;
        const IndexRange keys =
            keys_seen_by_any(band, row, metal::min(row + kFragment, band.seqlen_q) - 1);
        if (k_start >= keys.end || k_start + BK <= keys.begin) {
          continue;
        }
        add_mask_gradient<T, D, DV>(
            dM, query + b * params.q_stride_b + h * params.q_stride_h + row * params.q_stride_s,
            dout + b * bwd.dout_stride_b + h * bwd.dout_stride_h + row * bwd.dout_stride_s,
            key + b * params.k_stride_b + kv_head * params.k_stride_h + k_start * params.k_stride_s,
            value + b * params.v_stride_b + kv_head * params.v_stride_h +
                k_start * params.v_stride_s,
            bwd, band, mod, dropout, shift, row_delta, row, k_start, lane);
      }
    }
  }

  // Sum over the rows where the mask has one, and store.
  device M* out = dmask + own_batch * bwd.dmask_stride_b + own_head * bwd.dmask_stride_h;
  const int q_idx = all_rows ? at.row : own_row + at.row;
  const int num_rows = all_rows ? 1 : band.seqlen_q;
  FLASH_MPS_UNROLL
  for (int j = 0; j < kCount; ++j) {
    float2 sum = elements(dM.fragments[j]);
    if (all_rows) {
      sum = column_sum(sum);
    }
    for (int i = 0; i < 2; ++i) {
      const int k_idx = k_start + j * kFragment + at.column + i;
      if (q_idx < num_rows && k_idx < band.seqlen_k) {
        out[q_idx * bwd.dmask_stride_q + k_idx] = M(sum[i]);
      }
    }
  }
}

}  // namespace flash_mps
