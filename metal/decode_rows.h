// The rows of one simdgroup of flash_decode, in registers: what it knows of them, one step over keys,
// and merging with what others know.
//
// Of the keys of a step each group of lanes reads its own, and keeps a running softmax of its own, so
// that a step needs no exchange but the sums of the products.
#pragma once

#include "decode_operands.h"
#include "decode_user.h"
#include "lane_rows.h"
#include "online_softmax.h"
#include "score_mod.h"

namespace flash_mps {

// Sizes that follow from the template arguments of the kernel.
template <typename T, typename KV, int D, int DV, int ROWS, int BK, int SG, bool STAGED>
struct DecodeTile {
  // Elements that a lane takes at a time: 16 bytes, where they are staged no more than a half has.
  static constant constexpr const int kElements =
      STAGED && sizeof(KV) == 1 ? 8 : kWideBytes / int(sizeof(KV));
  static constant constexpr const int kWords = ((D > DV ? D : DV) + kElements - 1) / kElements;
  static constant constexpr const int kLanes = lanes_per_row<kWords>();
  static constant constexpr const int kGroups = kSimdWidth / kLanes;  // rows of K read at a time
  static constant constexpr const int kLaneWords = (kWords + kLanes - 1) / kLanes;
  static constant constexpr const int kLaneElements = kLaneWords * kElements;
  // Of a staged row: whole words of 16 bytes.
  static constant constexpr const int kPitch =
      (kWords * kElements * int(sizeof(KV)) + kWideBytes - 1) / kWideBytes * kWideBytes /
      int(sizeof(KV));
  // Keys of one group of lanes in a step. Direct: four words in flight hide latency. Staged: up to four
  // simdgroups divide a block.
  static constant constexpr const int kWanted = STAGED ? BK / 4 / kGroups : 4 / kLaneWords;
  static constant constexpr const int kMost = kSimdWidth / kGroups;
  static constant constexpr const int kKeys = kWanted < 1 ? 1 : (kWanted < kMost ? kWanted : kMost);
  static constant constexpr const int kStep = kKeys * kGroups;
  static constant constexpr const int kBlock = STAGED ? BK : SG * kStep;
  static constant constexpr const int kMaskPitch = STAGED ? BK : kStep;
  static constant constexpr const int kMaskElements = ROWS * SG * kMaskPitch;
  static constant constexpr const int kQueryBytes = ROWS * D * int(sizeof(T));
  static constant constexpr const int kKeyBytes = STAGED ? 2 * BK * kPitch * int(sizeof(KV)) : 0;
  static constant constexpr const int kMergeBytes = SG * DV * int(sizeof(float));
  static constant constexpr const int kOwnBytes =
      kQueryBytes > kMergeBytes ? kQueryBytes : kMergeBytes;
  static constant constexpr const int kTileBytes = kKeyBytes > kOwnBytes ? kKeyBytes : kOwnBytes;
  static constant constexpr const int kTileWords = (kTileBytes + kWideBytes - 1) / kWideBytes;
  static constant constexpr const int kPlaces = STAGED ? 2 * BK : 1;
  // All of it: tile, places, mask, m and l.
  static constant constexpr const int kThreadgroupBytes =
      kWideBytes * (kTileWords + kPlaces) + 4 * (kMaskElements + 2 * SG * ROWS);
};

// The rows of one simdgroup, and what each group of lanes knows of them after the keys that it has read.
template <typename T, int ROWS, int COUNT>
struct DecodeRows {
  T Q[ROWS][COUNT];
  float O[ROWS][COUNT];
  SoftmaxState state[ROWS];
  int q_idx[ROWS];
  int head_idx[ROWS];
  int mask_row[ROWS];  // of the mask's tile
  float slope[ROWS];  // of ALiBi
  int count;  // of those ROWS that exist
};

// Element e of a lane is this column of its row.
template <typename Tile>
inline int lane_column(int e, int lane_in_row) {
  return (e / Tile::kElements * Tile::kLanes + lane_in_row) * Tile::kElements + e % Tile::kElements;
}

// m = -inf, l = 0, O = 0. `slopes` are those of the group's heads.
template <typename T, int ROWS, int COUNT>
inline void init_rows(
    thread DecodeRows<T, ROWS, COUNT>& rows,
    constant AttnDecodeParams& decode,
    const device float* slopes,
    int first_head,
    int first_row,
    int first_mask_row) {
  rows.count = decode.num_rows - first_row;
  FLASH_MPS_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    rows.state[r] = softmax_init();
    rows.q_idx[r] = (first_row + r) / decode.fwd.group_size;
    rows.head_idx[r] = first_head + (first_row + r) % decode.fwd.group_size;
    rows.mask_row[r] = mask_row_index(decode, first_row + r) - first_mask_row;
    rows.slope[r] =
        has_alibi && r < rows.count ? slopes[(first_row + r) % decode.fwd.group_size] : 0.0f;
    FLASH_MPS_UNROLL
    for (int e = 0; e < COUNT; ++e) {
      rows.O[r][e] = 0.0f;
    }
  }
}

template <typename Tile, int D, typename T, int ROWS, int COUNT>
inline void take_queries(
    thread DecodeRows<T, ROWS, COUNT>& rows, const threadgroup T* tile, int lane_in_row) {
  FLASH_MPS_UNROLL
  for (int e = 0; e < COUNT; ++e) {
    const int column = lane_column<Tile>(e, lane_in_row);
    FLASH_MPS_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      rows.Q[r][e] = column < D ? tile[r * D + column] : T(0);
    }
  }
}

// Raises m of row r to at least `m`; l and O follow.
template <typename T, int ROWS, int COUNT>
inline void rescale_row(thread DecodeRows<T, ROWS, COUNT>& rows, int r, float m) {
  const float rescale = softmax_raise(rows.state[r], m);
  if (rescale != 1.0f) {
    FLASH_MPS_UNROLL
    for (int e = 0; e < COUNT; ++e) {
      rows.O[r][e] *= rescale;
    }
  }
}

// What this lane holds of the rows of the step's keys; zeros in place of a key that no row sees, which
// is not read.
template <typename Tile, bool STAGED, typename KV>
inline void load_step(
    thread KV* elements,
    thread const KeyRows<KV>& rows,
    const threadgroup KV* tile,
    const thread KeyPlace* places,
    const thread uint* seen,
    int tile_row,
    int lane_in_row) {
  FLASH_MPS_UNROLL
  for (int i = 0; i < Tile::kKeys * Tile::kLaneWords; ++i) {
    const int j = i / Tile::kLaneWords;
    const int column = lane_column<Tile>(i % Tile::kLaneWords * Tile::kElements, lane_in_row);
    thread KV* word = elements + i * Tile::kElements;
    if (!STAGED) {
      load_word(
          word, key_row(rows, places[j]), column, seen[j] != 0 ? rows.columns : 0, rows.is_wide);
    } else {
      const bool is_inside = seen[j] != 0 && column < Tile::kPitch;
      const int offset = (tile_row + j * Tile::kGroups) * Tile::kPitch + column;
      load_tile<Tile::kElements>(word, tile + (is_inside ? offset : 0), is_inside);
    }
  }
}

// One step: keys `step` ... of the block that begins at k_start, for the rows of one simdgroup. Where it is
// open, the mask's tile holds nothing.
template <typename Tile, bool STAGED, typename T, typename KV, int ROWS, int COUNT>
inline void visit_keys(
    thread DecodeRows<T, ROWS, COUNT>& rows,
    constant AttnDecodeParams& decode,
    thread const KeySequence<KV>& keys,
    UserRows user,
    const threadgroup KV* K_tile,
    const threadgroup KV* V_tile,
    const threadgroup float* mask_tile,
    const threadgroup int4* place_tile,
    bool is_open,
    int k_start,
    int step,
    int k_end,
    int lane) {
  const int lane_in_row = lane % Tile::kLanes;
  const int k_first = step + lane / Tile::kLanes;

  // seen = which rows see which keys
  KeyPlace own_place = plain_place(keys, step + lane);
  if (!STAGED && has_places && lane < Tile::kStep && step + lane < k_end) {
    own_place = find_key(decode, keys, step + lane);
  }
  uint seen[Tile::kKeys];
  KeyPlace places[Tile::kKeys];
  FLASH_MPS_UNROLL
  for (int j = 0; j < Tile::kKeys; ++j) {
    const int k = k_first + j * Tile::kGroups;
    if (STAGED) {
      places[j] =
          has_places && k < k_end ? unpack_place(place_tile[k - k_start]) : plain_place(keys, k);
    } else {
      places[j] = has_places ? place_of_lane(own_place, k - step) : plain_place(keys, k);
    }
    const bool is_key = k < k_end && is_place(decode, places[j]);
    seen[j] = 0;
    FLASH_MPS_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      bool visible = r < rows.count && is_key && is_in_band(keys.band, rows.q_idx[r], k);
      if (has_mask && !is_open && visible) {
        visible = mask_tile[rows.mask_row[r] * Tile::kMaskPitch + k - k_start] != -INFINITY;
      }
      if (has_user_code && !is_open && visible) {
        visible = user_shows<T>(decode.fwd, user, rows.head_idx[r], rows.q_idx[r], k);
      }
      seen[j] |= visible ? 1u << uint(r) : 0u;
    }
  }

  // S = score_fwd(Q Kᵀ)
  KV elements[Tile::kKeys * COUNT];
  load_step<Tile, STAGED>(elements, keys.K, K_tile, places, seen, k_first - k_start, lane_in_row);
  float S[ROWS][Tile::kKeys];
  FLASH_MPS_UNROLL
  for (int j = 0; j < Tile::kKeys; ++j) {
    FLASH_MPS_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      const float product =
          sum_over_lanes<Tile::kLanes>(dot_elements<COUNT>(rows.Q[r], elements + j * COUNT));
      const bool visible = ((seen[j] >> uint(r)) & 1u) != 0u;
      float bias = 0.0f;
      if (has_mask && !is_open && visible) {
        bias =
            mask_tile[rows.mask_row[r] * Tile::kMaskPitch + k_first + j * Tile::kGroups - k_start];
      }
      float score = score_fwd(
          product * places[j].k_scale, decode.fwd, rows.slope[r], bias,
          rows.q_idx[r] + keys.band.offset, k_first + j * Tile::kGroups);
      if (has_user_score) {
        score = user_score(
            user.code, score, user.batch_idx, rows.head_idx[r], rows.q_idx[r],
            k_first + j * Tile::kGroups);
      }
      S[r][j] = visible ? score : -INFINITY;
      if (has_user_score && S[r][j] == -INFINITY) {
        seen[j] &= ~(1u << uint(r));
      }
    }
  }

  // m' = max(m, max S); P = exp(S - m'); l = l·exp(m - m') + sum P; O = O·exp(m - m')
  FLASH_MPS_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    float step_max = S[r][0];
    FLASH_MPS_UNROLL
    for (int j = 1; j < Tile::kKeys; ++j) {
      step_max = metal::max(step_max, S[r][j]);
    }
    rescale_row(rows, r, step_max);
    const float shift = softmax_shift(rows.state[r].m);
    FLASH_MPS_UNROLL
    for (int j = 0; j < Tile::kKeys; ++j) {
      S[r][j] = softmax_exp(S[r][j], shift);
      rows.state[r].l += S[r][j];
    }
  }

  // O = O + P V
  load_step<Tile, STAGED>(elements, keys.V, V_tile, places, seen, k_first - k_start, lane_in_row);
  FLASH_MPS_UNROLL
  for (int j = 0; j < Tile::kKeys; ++j) {
    // Without weight a key has no value, whatever its scale.
    const float scale = seen[j] != 0 ? places[j].v_scale : 0.0f;
    FLASH_MPS_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      add_elements<COUNT>(rows.O[r], S[r][j] * scale, elements + j * COUNT);
    }
  }
}

// Merges what the groups of lanes of a simdgroup know.
template <typename Tile, typename T, int ROWS, int COUNT>
inline void merge_lanes(thread DecodeRows<T, ROWS, COUNT>& rows) {
  FLASH_MPS_UNROLL
  for (int step = Tile::kLanes; step < kSimdWidth; step *= 2) {
    FLASH_MPS_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      rescale_row(rows, r, metal::simd_shuffle_xor(rows.state[r].m, ushort(step)));
      rows.state[r].l += metal::simd_shuffle_xor(rows.state[r].l, ushort(step));
      FLASH_MPS_UNROLL
      for (int e = 0; e < COUNT; ++e) {
        rows.O[r][e] += metal::simd_shuffle_xor(rows.O[r][e], ushort(step));
      }
    }
  }
}

// The lane's words of one row of O to threadgroup memory.
template <typename Tile, int DV>
inline void put_row(threadgroup float* row, const thread float* O, int lane_in_row) {
  FLASH_MPS_UNROLL
  for (int e = 0; e < Tile::kLaneElements; ++e) {
    const int column = lane_column<Tile>(e, lane_in_row);
    if (column < DV) {
      row[column] = O[e];
    }
  }
}

}  // namespace flash_mps
