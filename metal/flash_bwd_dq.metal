// flash_bwd_dq: the gradient of query (Dao 2023, "FlashAttention-2", algorithm 2, without its atomics: one
// threadgroup owns its query rows).
//
//   load lse, delta [, Q, dO]          rows of one simdgroup; Q and dO where they have registers
//   dQ = 0
//   for each K block that a row of the threadgroup sees, by its band and by the block's class:
//     [stage K, V]                     Staged path only
//     S = Q Kᵀ; S = score_fwd(S); hide keys; P = exp(S - lse)
//     dP = dO Vᵀ; dS = P (dP - delta); dS = score_bwd(dS)
//     dQ = dQ + dS K
//   dQ = dQ · scale
//
// A threadgroup accumulates COLUMNS columns of dQ, those of its head block: all, unless dQ would need
// more registers than there are. S and dP are computed once per head block.
//
// Grid: (query blocks · head blocks, query heads, batch). Threadgroup: BQ / 8 simdgroups of 8 rows each.
// Threadgroup memory: Staged BK · (D + DV + 2 pads of 16 bytes) · sizeof(T); Direct none.
// Launched by csrc/flash_bwd.cpp.

#include "attn_params.h"
#include "tile.h"
#include "row_products.h"
#include "online_softmax.h"
#include "mask.h"
#include "sequence.h"
#include "score_mod.h"
#include "dropout.h"
#include "softmax_bwd.h"

namespace flash_mps {

template <typename T, int D, int DV, int BQ, int BK, bool STAGED, bool IN_REGISTERS, int COLUMNS>
[[kernel]] void flash_bwd_dq(
    const device T* query [[buffer(kQueryBuffer)]],
    const device T* key [[buffer(kKeyBuffer)]],
    const device T* value [[buffer(kValueBuffer)]],
    const device T* dout [[buffer(kDOutBuffer)]],
    const device float* lse [[buffer(kLseBuffer)]],
    const device float* delta [[buffer(kDeltaBuffer)]],
    device T* dquery [[buffer(kDQueryBuffer)]],
    constant AttnBwdParams& bwd [[buffer(kParamsBuffer)]],
    FLASH_MPS_SCORE_BUFFERS,
    FLASH_MPS_SEQUENCE_BUFFERS,
    uint3 block [[threadgroup_position_in_grid]],
    uint thread_idx [[thread_index_in_threadgroup]],
    uint simdgroup_idx [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constant AttnParams& params = bwd.fwd;
  constexpr int kWordElements = kWideBytes / int(sizeof(T));
  constexpr int kKPitch = D + kWordElements;
  constexpr int kVPitch = DV + kWordElements;
  constexpr int kThreads = BQ / kFragment * kSimdWidth;
  constexpr int kHeadBlocks = (D + COLUMNS - 1) / COLUMNS;
  static_assert(D % kFragment == 0 && DV % kFragment == 0, "round head_dim up to a multiple of 8");
  static_assert(BQ % kFragment == 0 && BK % kFragment == 0, "block_q, block_k: multiples of 8");
  static_assert(BK <= 32, "block_k: the keys that a block shows are kept in 32 bits");
  static_assert(
      FLASH_MPS_CLASS_BLOCK % BQ == 0 && FLASH_MPS_CLASS_BLOCK % BK == 0,
      "block_q, block_k: a tile lies within one block of block_classes");
  static_assert(
      !STAGED || BK * (kKPitch + kVPitch) * int(sizeof(T)) <= 32768,
      "K and V tiles exceed 32 KB: lower block_k in instances.h");
  threadgroup uint4 K_words[STAGED ? BK * kKPitch / kWordElements : 1];
  threadgroup uint4 V_words[STAGED ? BK * kVPitch / kWordElements : 1];
  threadgroup T* K_tile = reinterpret_cast<threadgroup T*>(K_words);
  threadgroup T* V_tile = reinterpret_cast<threadgroup T*>(V_words);

  // Locate the tile.
  const LanePosition at = lane_position(lane);
  const OwnedBlock own = owned_block<kQueryBlock, BQ>(
      params, FLASH_MPS_CU_SEQLENS, params.first_q_block + int(block.x) / kHeadBlocks,
      int(block.z));
  const int first_column = int(block.x) % kHeadBlocks * COLUMNS;
  const Sequence sequence = own.sequence;
  const Band band = sequence.band;
  const int batch_idx = sequence.batch_idx;
  const int head_idx = int(block.y);
  const int kv_head_idx = head_idx / params.group_size;
  const int block_first = own.first;
  if (block_first >= band.seqlen_q) {
    return;
  }
  const int block_last = metal::min(block_first + BQ, band.seqlen_q) - 1;
  const int first_row = block_first + int(simdgroup_idx) * kFragment;
  const int last_row = metal::min(first_row + kFragment, band.seqlen_q) - 1;
  const int rows = last_row - first_row + 1;
  const device T* Q_rows = query + batch_idx * params.q_stride_b + head_idx * params.q_stride_h +
                           (sequence.first_query + first_row) * params.q_stride_s;
  const device T* dO_rows = dout + batch_idx * bwd.dout_stride_b + head_idx * bwd.dout_stride_h +
                            (sequence.first_query + first_row) * bwd.dout_stride_s;
  const device T* K_head = key + batch_idx * params.k_stride_b + kv_head_idx * params.k_stride_h +
                           sequence.first_key * params.k_stride_s;
  const device T* V_head = value + batch_idx * params.v_stride_b + kv_head_idx * params.v_stride_h +
                           sequence.first_key * params.v_stride_s;
  ScoreMod mod = FLASH_MPS_SCORE_MOD(T, params, batch_idx, head_idx);
  const Dropout dropout = dropout_of(params, batch_idx, head_idx);

  // Load lse, delta, Q, dO.
  const int64_t row = lse_row(params, sequence, head_idx, first_row + at.row);
  const bool is_row = at.row < rows;
  const float row_shift = is_row ? softmax_shift(lse[row]) : 0.0f;
  const float row_delta = is_row ? delta[row] : 0.0f;
  Strip<T, IN_REGISTERS ? D / kFragment : 1> Q;
  Strip<T, IN_REGISTERS ? DV / kFragment : 1> dO;
  if (IN_REGISTERS) {
    load_strip(Q, Q_rows, params.q_stride_s, rows, params.head_dim, lane);
    load_strip(dO, dO_rows, bwd.dout_stride_s, rows, params.head_dim_v, lane);
  }
  Strip<float, COLUMNS / kFragment> dQ;
  fill(dQ, 0.0f);

  const IndexRange block_keys = keys_seen_by_any(band, block_first, block_last);
  const IndexRange any_keys = keys_seen_by_any(band, first_row, last_row);
  const IndexRange all_keys = keys_seen_by_all(band, first_row, last_row);
  for (int k_start = block_keys.begin / BK * BK; k_start < block_keys.end; k_start += BK) {
    mod.mask.tile_class = class_of_tile(params, mod.mask, block_first, k_start);
    if (mod.mask.tile_class == kHiddenBlock) {
      continue;
    }
    const int keys = metal::min(BK, band.seqlen_k - k_start);
    const device T* K_rows = K_head + k_start * params.k_stride_s;
    const device T* V_rows = V_head + k_start * params.v_stride_s;
    if (STAGED) {
      // The tiles of the block before are used up.
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      stage_tile<T, BK, D, kKPitch, kThreads>(
          K_tile, K_rows, params.k_stride_s, keys, params.head_dim, params.k_is_wide, thread_idx);
      stage_tile<T, BK, DV, kVPitch, kThreads>(
          V_tile, V_rows, params.v_stride_s, keys, params.head_dim_v, params.v_is_wide, thread_idx);
      // Every thread reads what others staged.
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    }
    if (rows <= 0 || k_start >= any_keys.end || k_start + BK <= any_keys.begin) {
      continue;
    }

    // S = Q Kᵀ
    Strip<float, BK / kFragment> S;
    if (STAGED) {
      multiply_rows<D, IN_REGISTERS, true>(
          S, Q, Q_rows, params.q_stride_s, rows, K_tile, kKPitch, BK, params.head_dim, lane);
    } else {
      multiply_rows<D, IN_REGISTERS, false>(
          S, Q, Q_rows, params.q_stride_s, rows, K_rows, params.k_stride_s, keys, params.head_dim,
          lane);
    }

    // S = score_fwd(S); hide keys; P = exp(S - lse)
    Strip<float, BK / kFragment> slope;
    score_slope<false>(slope, S, params, mod, first_row, k_start, at);
    score_fwd<T, false>(S, params, band, mod, first_row, k_start, at);
    const bool has_hidden_keys =
        has_mask || has_user_code || k_start < all_keys.begin || k_start + BK > all_keys.end;
    uint seen = ~0u;
    if (has_hidden_keys) {
      seen = apply_visibility<false>(S, params, band, mod.mask, first_row, k_start, at);
    }
    probabilities(S, row_shift);

    // dP = dO Vᵀ; dS = P (dP - delta); dS = score_bwd(dS)
    Strip<float, BK / kFragment> dS;
    if (STAGED) {
      multiply_rows<DV, IN_REGISTERS, true>(
          dS, dO, dO_rows, bwd.dout_stride_s, rows, V_tile, kVPitch, BK, params.head_dim_v, lane);
    } else {
      multiply_rows<DV, IN_REGISTERS, false>(
          dS, dO, dO_rows, bwd.dout_stride_s, rows, V_rows, params.v_stride_s, keys,
          params.head_dim_v, lane);
    }
    apply_dropout<false>(dS, params, dropout, first_row, k_start, at);
    softmax_bwd(dS, S, row_delta);
    score_bwd(dS, slope);

    // dQ = dQ + dS K
    FLASH_MPS_UNROLL
    for (int d = 0; d < COLUMNS; d += kFragment) {
      const int column = first_column + d;
      thread Fragment<float>& dQ_fragment = dQ.fragments[d / kFragment];
      if (column >= D) {
        continue;
      }
      if (STAGED) {
        multiply<T>(dQ_fragment, dS, K_tile + column, kKPitch, BK, kFragment, seen, lane);
      } else {
        const int columns = params.head_dim - column;
        multiply<T>(dQ_fragment, dS, K_rows + column, params.k_stride_s, keys, columns, seen, lane);
      }
    }
  }

  // dQ = dQ · scale
  device T* dQ_rows = dquery + batch_idx * bwd.dq_stride_b + head_idx * bwd.dq_stride_h +
                      (sequence.first_query + first_row) * bwd.dq_stride_s + first_column;
  store_strip(
      dQ, params.softmax_scale, dQ_rows, bwd.dq_stride_s, rows, params.head_dim - first_column,
      lane);
}

}  // namespace flash_mps
