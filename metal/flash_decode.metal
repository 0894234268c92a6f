// flash_decode: attention of few query rows, bound by reading K and V once (Dao et al. 2023,
// "Flash-Decoding for long-context inference"). Its rows are those of all queries of all heads that
// read one KV head.
//
//   load Q                              ROWS rows a simdgroup
//   m = -inf, l = 0, O = 0              of each group of lanes, for the keys that it reads
//   for each block of this split's keys:
//     [stage K, V, mask]                Staged: every simdgroup reads them, for its own rows
//     for each step of keys that is this simdgroup's:
//       seen = which rows see which keys; a key that none sees is not read
//       S = score_fwd(Q Kᵀ)             lanes split head_dim, simdgroups split keys
//       m' = max(m, max S); P = exp(S - m'); l = l·exp(m - m') + sum P
//       O = O·exp(m - m') + P V
//   merge m, l, O over the groups of lanes, then over the simdgroups that share rows
//   out = O / l; lse = m + log l        one split
//   partial = O, m, l                   several: flash_decode_combine merges them
//
// Grid: (splits * row blocks, KV heads, batch). Threadgroup: SG simdgroups; tile t of the row block
// belongs to simdgroups t, t + row_tiles, ...
// Threadgroup memory: the largest of the Q tile, the staged K and V, SG rows of O; the mask's tile; where
// the keys of two blocks lie.
// Launched by csrc/flash_decode.cpp.

#include "attn_params.h"
#include "online_softmax.h"
#include "mask.h"
#include "decode_classes.h"
#include "decode_operands.h"
#include "decode_rows.h"

namespace flash_mps {

constant bool has_lse [[function_constant(kHasLseConstant)]];
constant bool is_split [[function_constant(kIsSplitConstant)]];
constant bool is_whole = !is_split;
constant bool has_sinks [[function_constant(kHasSinksConstant)]];

// Where a row's results go: its number among all rows, and its elements of out.
struct ResultRow {
  int head_idx;
  int64_t index;
  int64_t offset;
};

inline ResultRow result_row(constant AttnParams& params, int batch_idx, int head_first, int row) {
  const int q_idx = row / params.group_size;
  const int head_idx = head_first + row % params.group_size;
  ResultRow result;
  result.head_idx = head_idx;
  result.index = (int64_t(batch_idx) * params.num_heads_q + head_idx) * params.seqlen_q + q_idx;
  result.offset = batch_idx * params.out_stride_b + head_idx * params.out_stride_h +
                  q_idx * params.out_stride_s;
  return result;
}

inline void store_partial(
    device float* partial,
    constant AttnDecodeParams& decode,
    int split_idx,
    int64_t row,
    int column,
    float o,
    SoftmaxState state) {
  const int64_t slot = split_idx * decode.total_rows + row;
  partial[slot * decode.fwd.head_dim_v + column] = o;
  if (column == 0) {
    const int64_t size = decode.num_splits * decode.total_rows * decode.fwd.head_dim_v;
    partial[size + 2 * slot] = state.m;
    partial[size + 2 * slot + 1] = state.l;
  }
}

template <typename T, typename KV, int D, int DV, int ROWS, int BK, int SG, bool STAGED>
[[kernel, max_total_threads_per_threadgroup(SG* kSimdWidth)]] void flash_decode(
    const device T* query [[buffer(kQueryBuffer)]],
    const device KV* key [[buffer(kKeyBuffer)]],
    const device KV* value [[buffer(kValueBuffer)]],
    device T* out [[buffer(kOutBuffer), function_constant(is_whole)]],
    constant AttnDecodeParams& decode [[buffer(kParamsBuffer)]],
    device float* lse [[buffer(kLseBuffer), function_constant(has_lse)]],
    FLASH_MPS_SCORE_BUFFERS,
    const device float* sinks [[buffer(kSinksBuffer), function_constant(has_sinks)]],
    device float* partial [[buffer(kPartialBuffer), function_constant(is_split)]],
    const device float* k_scale [[buffer(kKeyScaleBuffer), function_constant(is_quantized)]],
    const device float* v_scale [[buffer(kValueScaleBuffer), function_constant(is_quantized)]],
    constant int* seqlens [[buffer(kSeqlensBuffer), function_constant(is_cached)]],
    constant int* leftpad [[buffer(kLeftpadBuffer), function_constant(is_cached)]],
    const device int* batch_idxs [[buffer(kBatchIdxBuffer), function_constant(is_cached)]],
    const device int* block_table [[buffer(kBlockTableBuffer), function_constant(is_paged)]],
    uint3 block [[threadgroup_position_in_grid]],
    uint thread_idx [[thread_index_in_threadgroup]],
    uint simdgroup_idx [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  using Tile = DecodeTile<T, KV, D, DV, ROWS, BK, SG, STAGED>;
  constexpr int kThreads = SG * kSimdWidth;
  static_assert(
      Tile::kThreadgroupBytes <= 32768,
      "threadgroup memory exceeds 32 KB: lower block_k or rows in instances.h");
  threadgroup uint4 tile_words[Tile::kTileWords];
  threadgroup float mask_tile[Tile::kMaskElements];
  threadgroup int4 place_tile[Tile::kPlaces];
  threadgroup float merge_m[SG * ROWS];
  threadgroup float merge_l[SG * ROWS];
  constant AttnParams& params = decode.fwd;

  // Locate the rows and their keys.
  const int split_idx = int(block.x) % decode.num_splits;
  const int row_block = decode.first_row_block + int(block.x) / decode.num_splits;
  const int kv_head_idx = int(block.y);
  const int batch_idx = int(block.z);
  const int head_first = kv_head_idx * params.group_size;
  const int row_tiles = decode.row_tiles;
  const int tile_idx = int(simdgroup_idx) % row_tiles;
  const int slice_idx = int(simdgroup_idx) / row_tiles;
  const int num_slices = SG / row_tiles;
  const int block_first = row_block * ROWS * row_tiles;
  const int block_last = metal::min(block_first + ROWS * row_tiles, decode.num_rows) - 1;
  KeySequence<KV> keys = key_sequence(decode, key, value, kv_head_idx);
  keys.entry = batch_idx;
  keys.band = band_of_sequence(decode, seqlens, leftpad, batch_idx);
  if (is_cached && decode.has_batch_idx != 0) {
    keys.entry = batch_idxs[batch_idx];
  }
  if (is_paged) {
    keys.pages = block_table + batch_idx * decode.block_table_stride_b;
  }
  if (is_quantized) {
    keys.k_scale = k_scale + kv_head_idx * decode.k_scale_stride_h;
    keys.v_scale = v_scale + kv_head_idx * decode.v_scale_stride_h;
  }
  const IndexRange all_keys =
      keys_seen_by_any(keys.band, block_first / params.group_size, block_last / params.group_size);
  const IndexRange own_keys = keys_of_split(all_keys, split_idx, decode.num_splits);
  const device uchar* plane =
      has_mask ? mask_plane<T>(params, mask, batch_idx, head_first) : nullptr;
  UserRows user;
  user.code = FLASH_MPS_USER_CODE;
  user.block_classes = has_block_classes ? block_classes : nullptr;
  user.batch_idx = batch_idx;
  const MaskRows mask_rows = mask_rows_of(decode, block_first, block_last);
  const RowClasses row_classes = classes_of_rows(
      decode, has_block_classes ? block_classes : nullptr, batch_idx, head_first, block_first,
      block_last);
  threadgroup KV* K_tile = reinterpret_cast<threadgroup KV*>(tile_words);
  threadgroup KV* V_tile = K_tile + (STAGED ? BK * Tile::kPitch : 0);
  threadgroup float* own_mask =
      mask_tile + (STAGED ? 0 : int(simdgroup_idx) * ROWS * Tile::kMaskPitch);

  // Load Q; m = -inf, l = 0, O = 0
  DecodeRows<T, ROWS, Tile::kLaneElements> rows;
  const device float* slopes =
      has_alibi ? alibi_slopes + batch_idx * params.alibi_stride_b + head_first : nullptr;
  init_rows(rows, decode, slopes, head_first, block_first + tile_idx * ROWS, mask_rows.first);
  const device T* group_query =
      query + batch_idx * params.q_stride_b + head_first * params.q_stride_h;
  threadgroup T* Q_tile = reinterpret_cast<threadgroup T*>(tile_words);
  for (int tile = 0; tile < row_tiles; ++tile) {
    // The tile before is taken.
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    stage_queries<T, ROWS, D, kThreads>(
        Q_tile, group_query, decode, block_first + tile * ROWS, int(thread_idx));
    // Every lane takes what others staged.
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (tile == tile_idx) {
      take_queries<Tile, D>(rows, Q_tile, int(lane) % Tile::kLanes);
    }
  }

  // Places are found one block ahead.
  threadgroup int4* places = place_tile;
  threadgroup int4* next_places = place_tile + (STAGED ? BK : 0);
  if (STAGED && has_places) {
    stage_places<KV, kThreads>(
        places, decode, keys, own_keys.begin, metal::min(own_keys.begin + BK, own_keys.end),
        int(thread_idx));
  }
  for (int k_start = own_keys.begin; k_start < own_keys.end; k_start += Tile::kBlock) {
    const int k_end = metal::min(k_start + Tile::kBlock, own_keys.end);
    // Of keys that no row sees, only the places of the next block are of use.
    int tile_class =
        STAGED ? class_of_keys(params, row_classes, k_start, k_end, int(lane)) : kMixedBlock;
    if (STAGED && tile_class == kHiddenBlock && !has_places) {
      continue;
    }
    if (STAGED) {
      // The tiles of the block before, or of Q, are used up.
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      if (tile_class != kHiddenBlock) {
        stage_keys<KV, Tile::kPitch, kThreads>(
            K_tile, keys.K, places, decode, keys, k_start, k_end, int(thread_idx));
        stage_keys<KV, Tile::kPitch, kThreads>(
            V_tile, keys.V, places, decode, keys, k_start, k_end, int(thread_idx));
      }
      if (has_mask && tile_class == kMixedBlock) {
        stage_mask<T, Tile::kMaskPitch, kThreads>(
            mask_tile, plane, decode, mask_rows, k_start, k_end, int(thread_idx));
      }
      if (has_places) {
        stage_places<KV, kThreads>(
            next_places, decode, keys, k_end, metal::min(k_end + BK, own_keys.end),
            int(thread_idx));
      }
      // Every simdgroup reads what others staged.
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    }
    const int first_step = k_start + slice_idx * Tile::kStep;
    for (int step = first_step; step < k_end; step += num_slices * Tile::kStep) {
      if (!STAGED) {
        tile_class = class_of_keys(
            params, row_classes, step, metal::min(step + Tile::kStep, k_end), int(lane));
      }
      if (tile_class == kHiddenBlock) {
        continue;
      }
      if (!STAGED && has_mask && tile_class == kMixedBlock) {
        // The mask of the step before is used up.
        metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
        stage_mask<T, Tile::kMaskPitch, kSimdWidth>(
            own_mask, plane, decode, mask_rows, step, metal::min(step + Tile::kStep, k_end),
            int(lane));
        // Every lane reads what others staged.
        metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
      }
      visit_keys<Tile, STAGED>(
          rows, decode, keys, user, K_tile, V_tile, own_mask, places, tile_class == kOpenBlock,
          STAGED ? k_start : step, step, k_end, int(lane));
    }
    threadgroup int4* used_places = places;
    places = next_places;
    next_places = used_places;
  }

  // merge m, l, O over the groups of lanes, then over the simdgroups that share rows
  merge_lanes<Tile>(rows);
  if (lane == 0) {
    FLASH_MPS_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      merge_m[int(simdgroup_idx) * ROWS + r] = rows.state[r].m;
    }
  }
  // Every simdgroup reads the m of those that share its rows.
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  FLASH_MPS_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    rescale_row(
        rows, r, max_over_slices(merge_m, tile_idx * ROWS + r, row_tiles * ROWS, num_slices));
    if (lane == 0) {
      merge_l[int(simdgroup_idx) * ROWS + r] = rows.state[r].l;
    }
  }

  threadgroup float* O_tile = reinterpret_cast<threadgroup float*>(tile_words);
  FLASH_MPS_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    // The staged keys, or the row before, are used up.
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (int(lane) < Tile::kLanes) {
      put_row<Tile, DV>(O_tile + int(simdgroup_idx) * DV, rows.O[r], int(lane));
    }
    // Every thread sums what the simdgroups wrote.
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    for (int i = int(thread_idx); i < row_tiles * DV; i += kThreads) {
      const int tile = i / DV;
      const int column = i % DV;
      const int row = block_first + tile * ROWS + r;
      if (row >= decode.num_rows || column >= params.head_dim_v) {
        continue;
      }
      SoftmaxState state;
      state.m = max_over_slices(merge_m, tile * ROWS + r, row_tiles * ROWS, num_slices);
      state.l = sum_over_slices(merge_l, tile * ROWS + r, row_tiles * ROWS, num_slices);
      const float o = sum_over_slices(O_tile, tile * DV + column, row_tiles * DV, num_slices);
      const ResultRow result = result_row(params, batch_idx, head_first, row);
      if (is_split) {
        store_partial(partial, decode, split_idx, result.index, column, o, state);
      } else {
        const float rescale = has_sinks ? softmax_add_sink(state, sinks[result.head_idx]) : 1.0f;
        out[result.offset + column] = T(o * rescale * softmax_normaliser(state));
        if (has_lse && column == 0) {
          lse[result.index] = softmax_lse(state);
        }
      }
    }
  }
}

}  // namespace flash_mps
