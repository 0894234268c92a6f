// flash_bwd_dkv: the gradients of key and value (Dao 2023, "FlashAttention-2", algorithm 2). One threadgroup
// owns its keys and goes through every query head of the group and every query block that sees
// them, so nothing is added from two sides: no atomics, no scratch, one result on every run. Works on
// the transpose of S, whose rows are keys.
//
//   [load K, V]                        rows of one simdgroup, where they have registers
//   dK = 0, dV = 0
//   for each query head of the group, for each Q block that sees a key of the threadgroup, by its band
//     and by the block's class:
//     [stage Q, dO, lse, delta]        Staged path only
//     Sᵀ = K Qᵀ; Sᵀ = score_fwd(Sᵀ); hide keys; Pᵀ = exp(Sᵀ - lse)
//     dV = dV + Pᵀ dO
//     dPᵀ = V dOᵀ; dSᵀ = Pᵀ (dPᵀ - delta); dSᵀ = score_bwd(dSᵀ)
//     dK = dK + dSᵀ Q
//   dK = dK · scale
//
// A threadgroup accumulates COLUMNS columns of dK and dV, those of its head block: above 128, one block
// would need more registers than there are, so S and dP are computed once per head block.
//
// Grid: (key blocks · head blocks, KV heads, batch). Threadgroup: BK / 8 simdgroups of 8 keys each.
// Threadgroup memory: Staged BQ · ((D + DV + 2 pads of 16 bytes) · sizeof(T) + 8); Direct none.
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
[[kernel]] void flash_bwd_dkv(
    const device T* query [[buffer(kQueryBuffer)]],
    const device T* key [[buffer(kKeyBuffer)]],
    const device T* value [[buffer(kValueBuffer)]],
    const device T* dout [[buffer(kDOutBuffer)]],
    const device float* lse [[buffer(kLseBuffer)]],
    const device float* delta [[buffer(kDeltaBuffer)]],
    device T* dkey [[buffer(kDKeyBuffer)]],
    device T* dvalue [[buffer(kDValueBuffer)]],
    constant AttnBwdParams& bwd [[buffer(kParamsBuffer)]],
    FLASH_MPS_SCORE_BUFFERS,
    FLASH_MPS_SEQUENCE_BUFFERS,
    uint3 block [[threadgroup_position_in_grid]],
    uint thread_idx [[thread_index_in_threadgroup]],
    uint simdgroup_idx [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constant AttnParams& params = bwd.fwd;
  constexpr int kWordElements = kWideBytes / int(sizeof(T));
  constexpr int kQPitch = D + kWordElements;
  constexpr int kDOPitch = DV + kWordElements;
  constexpr int kThreads = BK / kFragment * kSimdWidth;
  constexpr int kHeadBlocks = ((D > DV ? D : DV) + COLUMNS - 1) / COLUMNS;
  static_assert(D % kFragment == 0 && DV % kFragment == 0, "round head_dim up to a multiple of 8");
  static_assert(BQ % kFragment == 0 && BK % kFragment == 0, "block_q, block_k: multiples of 8");
  static_assert(BQ <= 32, "block_q: the queries that a block shows are kept in 32 bits");
  static_assert(
      FLASH_MPS_CLASS_BLOCK % BQ == 0 && FLASH_MPS_CLASS_BLOCK % BK == 0,
      "block_q, block_k: a tile lies within one block of block_classes");
  static_assert(
      !STAGED || BQ * ((kQPitch + kDOPitch) * int(sizeof(T)) + 8) <= 32768,
      "Q and dO tiles exceed 32 KB: lower block_q in instances.h");
  threadgroup uint4 Q_words[STAGED ? BQ * kQPitch / kWordElements : 1];
  threadgroup uint4 dO_words[STAGED ? BQ * kDOPitch / kWordElements : 1];
  threadgroup float lse_tile[STAGED ? BQ : 1];
  threadgroup float delta_tile[STAGED ? BQ : 1];
  threadgroup T* Q_tile = reinterpret_cast<threadgroup T*>(Q_words);
  threadgroup T* dO_tile = reinterpret_cast<threadgroup T*>(dO_words);

  // Locate the tile.
  const LanePosition at = lane_position(lane);
  const OwnedBlock own = owned_block<kKeyBlock, BK>(
      params, FLASH_MPS_CU_SEQLENS, bwd.first_k_block + int(block.x) / kHeadBlocks, int(block.z));
  const Sequence sequence = own.sequence;
  const Band band = sequence.band;
  const int batch_idx = sequence.batch_idx;
  const int kv_head_idx = int(block.y);
  const int first_column = int(block.x) % kHeadBlocks * COLUMNS;
  const int block_first = own.first;
  if (block_first >= band.seqlen_k) {
    return;
  }
  const int block_last = metal::min(block_first + BK, band.seqlen_k) - 1;
  const int first_row = block_first + int(simdgroup_idx) * kFragment;
  const int last_row = metal::min(first_row + kFragment, band.seqlen_k) - 1;
  const int rows = last_row - first_row + 1;
  const device T* K_rows = key + batch_idx * params.k_stride_b + kv_head_idx * params.k_stride_h +
                           (sequence.first_key + first_row) * params.k_stride_s;
  const device T* V_rows = value + batch_idx * params.v_stride_b + kv_head_idx * params.v_stride_h +
                           (sequence.first_key + first_row) * params.v_stride_s;

  // Load K, V.
  Strip<T, IN_REGISTERS ? D / kFragment : 1> K;
  Strip<T, IN_REGISTERS ? DV / kFragment : 1> V;
  if (IN_REGISTERS) {
    load_strip(K, K_rows, params.k_stride_s, rows, params.head_dim, lane);
    load_strip(V, V_rows, params.v_stride_s, rows, params.head_dim_v, lane);
  }
  Strip<float, (D < COLUMNS ? D : COLUMNS) / kFragment> dK;
  Strip<float, (DV < COLUMNS ? DV : COLUMNS) / kFragment> dV;
  fill(dK, 0.0f);
  fill(dV, 0.0f);

  const IndexRange block_queries = queries_that_see_any(band, block_first, block_last);
  const IndexRange any_queries = queries_that_see_any(band, first_row, last_row);
  const IndexRange all_queries = queries_that_see_all(band, first_row, last_row);
  const int first_q_start = block_queries.begin / BQ * BQ;
  const int num_q_blocks = metal::max(0, (block_queries.end - first_q_start + BQ - 1) / BQ);
  for (int step = 0; step < params.group_size * num_q_blocks; ++step) {
    const int head_idx = kv_head_idx * params.group_size + step / num_q_blocks;
    const int q_start = first_q_start + step % num_q_blocks * BQ;
    ScoreMod mod = FLASH_MPS_SCORE_MOD(T, params, batch_idx, head_idx);
    mod.mask.tile_class = class_of_tile(params, mod.mask, q_start, block_first);
    if (mod.mask.tile_class == kHiddenBlock) {
      continue;
    }
    const int queries = metal::min(BQ, band.seqlen_q - q_start);
    const device T* Q_rows = query + batch_idx * params.q_stride_b + head_idx * params.q_stride_h +
                             (sequence.first_query + q_start) * params.q_stride_s;
    const device T* dO_rows = dout + batch_idx * bwd.dout_stride_b + head_idx * bwd.dout_stride_h +
                              (sequence.first_query + q_start) * bwd.dout_stride_s;
    const int64_t row = lse_row(params, sequence, head_idx, q_start);
    if (STAGED) {
      // The tiles of the block before are used up.
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      stage_tile<T, BQ, D, kQPitch, kThreads>(
          Q_tile, Q_rows, params.q_stride_s, queries, params.head_dim, bwd.q_is_wide, thread_idx);
      stage_tile<T, BQ, DV, kDOPitch, kThreads>(
          dO_tile, dO_rows, bwd.dout_stride_s, queries, params.head_dim_v, bwd.dout_is_wide,
          thread_idx);
      stage_numbers<BQ>(lse_tile, lse + row, queries, thread_idx);
      stage_numbers<BQ>(delta_tile, delta + row, queries, thread_idx);
      // Every thread reads what others staged.
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    }
    if (rows <= 0 || q_start >= any_queries.end || q_start + BQ <= any_queries.begin) {
      continue;
    }
    ColumnValues<BQ / kFragment> shift;
    ColumnValues<BQ / kFragment> column_delta;
    if (STAGED) {
      load_columns(shift, lse_tile, BQ, at);
      load_columns(column_delta, delta_tile, BQ, at);
    } else {
      load_columns(shift, lse + row, queries, at);
      load_columns(column_delta, delta + row, queries, at);
    }
    shift_columns(shift);

    // Sᵀ = K Qᵀ
    Strip<float, BQ / kFragment> P;
    if (STAGED) {
      multiply_rows<D, IN_REGISTERS, true>(
          P, K, K_rows, params.k_stride_s, rows, Q_tile, kQPitch, BQ, params.head_dim, lane);
    } else {
      multiply_rows<D, IN_REGISTERS, false>(
          P, K, K_rows, params.k_stride_s, rows, Q_rows, params.q_stride_s, queries,
          params.head_dim, lane);
    }

    // Sᵀ = score_fwd(Sᵀ); hide keys; Pᵀ = exp(Sᵀ - lse)
    Strip<float, BQ / kFragment> slope;
    score_slope<true>(slope, P, params, mod, q_start, first_row, at);
    score_fwd<T, true>(P, params, band, mod, q_start, first_row, at);
    const bool has_hidden_keys = has_mask || has_user_code || rows < kFragment ||
                                 q_start < all_queries.begin || q_start + BQ > all_queries.end;
    uint seen = ~0u;
    if (has_hidden_keys) {
      seen = apply_visibility<true>(P, params, band, mod.mask, q_start, first_row, at);
    }
    probabilities(P, shift);

    // dV = dV + Pᵀ dO, without the pairs that were dropped
    const Dropout dropout = dropout_of(params, batch_idx, head_idx);
    Strip<float, BQ / kFragment> kept_P = P;
    apply_dropout<true>(kept_P, params, dropout, q_start, first_row, at);
    FLASH_MPS_UNROLL
    for (int d = 0; d < DV && d < COLUMNS; d += kFragment) {
      const int column = first_column + d;
      thread Fragment<float>& dV_fragment = dV.fragments[d / kFragment];
      if (column >= DV) {
        continue;
      }
      if (STAGED) {
        multiply<T>(dV_fragment, kept_P, dO_tile + column, kDOPitch, BQ, kFragment, seen, lane);
      } else {
        multiply<T>(
            dV_fragment, kept_P, dO_rows + column, bwd.dout_stride_s, queries,
            params.head_dim_v - column, seen, lane);
      }
    }

    // dPᵀ = V dOᵀ; dSᵀ = Pᵀ (dPᵀ - delta); dSᵀ = score_bwd(dSᵀ)
    Strip<float, BQ / kFragment> dS;
    if (STAGED) {
      multiply_rows<DV, IN_REGISTERS, true>(
          dS, V, V_rows, params.v_stride_s, rows, dO_tile, kDOPitch, BQ, params.head_dim_v, lane);
    } else {
      multiply_rows<DV, IN_REGISTERS, false>(
          dS, V, V_rows, params.v_stride_s, rows, dO_rows, bwd.dout_stride_s, queries,
          params.head_dim_v, lane);
    }
    apply_dropout<true>(dS, params, dropout, q_start, first_row, at);
    softmax_bwd(dS, P, column_delta);
    score_bwd(dS, slope);

    // dK = dK + dSᵀ Q
    FLASH_MPS_UNROLL
    for (int d = 0; d < D && d < COLUMNS; d += kFragment) {
      const int column = first_column + d;
      thread Fragment<float>& dK_fragment = dK.fragments[d / kFragment];
      if (column >= D) {
        continue;
      }
      if (STAGED) {
        multiply<T>(dK_fragment, dS, Q_tile + column, kQPitch, BQ, kFragment, seen, lane);
      } else {
        multiply<T>(
            dK_fragment, dS, Q_rows + column, params.q_stride_s, queries, params.head_dim - column,
            seen, lane);
      }
    }
  }

  // dK = dK · scale
  device T* dK_rows = dkey + batch_idx * bwd.dk_stride_b + kv_head_idx * bwd.dk_stride_h +
                      (sequence.first_key + first_row) * bwd.dk_stride_s + first_column;
  device T* dV_rows = dvalue + batch_idx * bwd.dv_stride_b + kv_head_idx * bwd.dv_stride_h +
                      (sequence.first_key + first_row) * bwd.dv_stride_s + first_column;
  store_strip(
      dK, params.softmax_scale, dK_rows, bwd.dk_stride_s, rows, params.head_dim - first_column,
      lane);
  store_strip(dV, 1.0f, dV_rows, bwd.dv_stride_s, rows, params.head_dim_v - first_column, lane);
}

}  // namespace flash_mps
