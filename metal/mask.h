// Which (query, key) pairs are visible: the band of causal masks and windows, the end of the
// sequence, the boolean mask; and from these which K blocks a tile of queries has to visit.
#pragma once

#include "attn_params.h"
#include "tile.h"

namespace flash_mps {

constant int mask_kind [[function_constant(kMaskKindConstant)]];
constant bool has_mask = mask_kind != kNoMask;
constant bool has_block_classes [[function_constant(kHasBlockClassesConstant)]];

// Keys or queries: begin <= index < end.
struct IndexRange {
  int begin;
  int end;
};

// What the queries of one sequence see: of its keys first_key ... seqlen_k - 1, query i sees
// i + begin <= j < i + end.
struct Band {
  int first_key;
  int seqlen_q;
  int seqlen_k;
  int begin;
  int end;
  int offset;  // query i stands at key i + offset
};

inline Band band_of(constant AttnParams& params) {
  Band band;
  band.first_key = 0;
  band.seqlen_q = params.seqlen_q;
  band.seqlen_k = params.seqlen_k;
  band.begin = params.band_begin;
  band.end = params.band_end;
  band.offset = params.causal_offset;
  return band;
}

inline bool is_in_band(Band band, int q_idx, int k_idx) {
  const int distance = k_idx - q_idx;
  return k_idx >= band.first_key && k_idx < band.seqlen_k && distance >= band.begin &&
         distance < band.end;
}

// Keys that at least one of the queries first ... last sees.
inline IndexRange keys_seen_by_any(Band band, int first, int last) {
  IndexRange keys;
  keys.begin = metal::max(band.first_key, metal::min(band.seqlen_k, first + band.begin));
  keys.end = metal::max(band.first_key, metal::min(band.seqlen_k, last + band.end));
  return keys;
}

// Keys that every one of the queries first ... last sees.
inline IndexRange keys_seen_by_all(Band band, int first, int last) {
  IndexRange keys;
  keys.begin = metal::max(band.first_key, metal::min(band.seqlen_k, last + band.begin));
  keys.end = metal::max(band.first_key, metal::min(band.seqlen_k, first + band.end));
  return keys;
}

// Queries that see at least one of the keys first ... last.
inline IndexRange queries_that_see_any(Band band, int first, int last) {
  IndexRange queries;
  queries.begin = metal::max(0, first - band.end + 1);
  queries.end = metal::min(band.seqlen_q, last - band.begin + 1);
  return queries;
}

// Queries that see every one of the keys first ... last.
inline IndexRange queries_that_see_all(Band band, int first, int last) {
  IndexRange queries;
  queries.begin = metal::max(0, last - band.end + 1);
  queries.end = metal::min(band.seqlen_q, first - band.begin + 1);
  return queries;
}

// A strip lies either as in S, rows are queries, or as in its transpose, rows are keys. The pair of
// element i of fragment j that this lane holds, for a strip whose first query and key are given.
struct ScorePosition {
  int q_idx;
  int k_idx;
};

template <bool TRANSPOSED>
inline ScorePosition score_position(int q_start, int k_start, LanePosition at, int j, int i) {
  const int column = j * kFragment + at.column + i;
  ScorePosition position;
  position.q_idx = q_start + (TRANSPOSED ? column : at.row);
  position.k_idx = k_start + (TRANSPOSED ? at.row : column);
  return position;
}

inline int64_t mask_offset(constant AttnParams& params, ScorePosition position) {
  return position.q_idx * params.mask_stride_q + position.k_idx * params.mask_stride_k;
}

// First byte of one batch entry and head of the mask, whose elements have the kind's size.
template <typename T, typename Params>
inline const device uchar* mask_plane(
    constant Params& params, const device uchar* mask, int batch_idx, int head_idx) {
  const int64_t element_bytes =
      mask_kind == kBoolMask ? 1 : (mask_kind == kSameMask ? int64_t(sizeof(T)) : 4);
  return mask +
         element_bytes * (batch_idx * params.mask_stride_b + head_idx * params.mask_stride_h);
}

// The mask of one batch entry and head.
struct HeadMask {
  const device uchar* plane;  // a mask_plane(), or null
  const device uchar* classes;  // of its blocks, or null
  int tile_class;  // of the tile at work; the mask of an open one is not read
};

template <typename T>
inline HeadMask head_mask(
    constant AttnParams& params,
    const device uchar* mask,
    const device uchar* block_classes,
    int batch_idx,
    int head_idx) {
  HeadMask head;
  head.plane = has_mask ? mask_plane<T>(params, mask, batch_idx, head_idx) : nullptr;
  head.classes = has_block_classes ? block_classes + batch_idx * params.class_stride_b +
                                         head_idx * params.class_stride_h
                                   : nullptr;
  head.tile_class = kMixedBlock;
  return head;
}

// The class of the block in which a tile lies.
inline int class_of_tile(constant AttnParams& params, HeadMask head, int q_start, int k_start) {
  if (!has_block_classes) {
    return kMixedBlock;
  }
  const int64_t q_block = q_start / FLASH_MPS_CLASS_BLOCK;
  const int64_t k_block = k_start / FLASH_MPS_CLASS_BLOCK;
  return head.classes[q_block * params.class_stride_q + k_block * params.class_stride_k];
}

inline bool is_visible(
    constant AttnParams& params, Band band, HeadMask head, ScorePosition position) {
  const bool in_band =
      position.q_idx < band.seqlen_q && is_in_band(band, position.q_idx, position.k_idx);
  if (mask_kind == kBoolMask && in_band && head.tile_class != kOpenBlock) {
    return head.plane[mask_offset(params, position)] != 0;
  }
  return in_band;
}

// Makes the score of each hidden pair -inf. Returns, one bit each, the columns of the strip that any
// row of the simdgroup sees.
template <bool TRANSPOSED, int COUNT>
inline uint apply_visibility(
    thread Strip<float, COUNT>& S,
    constant AttnParams& params,
    Band band,
    HeadMask head,
    int q_start,
    int k_start,
    LanePosition at) {
  uint seen = 0;
  FLASH_MPS_UNROLL
  for (int j = 0; j < COUNT; ++j) {
    float2 s = elements(S.fragments[j]);
    for (int i = 0; i < 2; ++i) {
      const bool visible =
          is_visible(params, band, head, score_position<TRANSPOSED>(q_start, k_start, at, j, i));
      s[i] = visible ? s[i] : -INFINITY;
      seen |= s[i] == -INFINITY ? 0u : 1u << uint(j * kFragment + at.column + i);
    }
    elements(S.fragments[j]) = s;
  }
  return metal::simd_or(seen);
}

}  // namespace flash_mps
