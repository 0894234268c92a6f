// Operands of flash_decode: where the keys of a sequence lie, in entries of a cache or in pages; rows of
// the mask; copies of both in threadgroup memory.
#pragma once

#include "attn_params.h"
#include "lane_rows.h"
#include "mask.h"
#include "score_mod.h"

namespace flash_mps {

constant bool is_cached [[function_constant(kIsCachedConstant)]];
constant bool is_paged [[function_constant(kIsPagedConstant)]];
constant bool is_quantized [[function_constant(kIsQuantizedConstant)]];

// The rows of K or V of one KV head.
template <typename KV>
struct KeyRows {
  const device KV* head;
  int64_t stride_b;
  int64_t stride_s;
  int columns;
  bool is_wide;
};

// The keys of one sequence and KV head.
template <typename KV>
struct KeySequence {
  KeyRows<KV> K;
  KeyRows<KV> V;
  const device float* k_scale;
  const device float* v_scale;
  const device int* pages;  // of this sequence
  int entry;  // of the cache
  Band band;
};

template <typename KV>
inline KeySequence<KV> key_sequence(
    constant AttnDecodeParams& decode,
    const device KV* key,
    const device KV* value,
    int kv_head_idx) {
  constant AttnParams& params = decode.fwd;
  KeySequence<KV> keys;
  keys.K.head = key + kv_head_idx * params.k_stride_h;
  keys.K.stride_b = params.k_stride_b;
  keys.K.stride_s = params.k_stride_s;
  keys.K.columns = params.head_dim;
  keys.K.is_wide = params.k_is_wide != 0;
  keys.V.head = value + kv_head_idx * params.v_stride_h;
  keys.V.stride_b = params.v_stride_b;
  keys.V.stride_s = params.v_stride_s;
  keys.V.columns = params.head_dim_v;
  keys.V.is_wide = params.v_is_wide != 0;
  keys.k_scale = nullptr;
  keys.v_scale = nullptr;
  keys.pages = nullptr;
  return keys;
}

// What the queries of sequence batch_idx see. Lengths are clamped to the capacity, so that a wrong one
// reads nothing outside the cache.
inline Band band_of_sequence(
    constant AttnDecodeParams& decode,
    constant int* seqlens,
    constant int* leftpad,
    int batch_idx) {
  Band band = band_of(decode.fwd);
  if (is_cached) {
    const int capacity = band.seqlen_k;
    if (decode.has_seqlens != 0) {
      band.seqlen_k = metal::clamp(seqlens[batch_idx] + decode.seqlen_new, 0, capacity);
    }
    if (decode.has_leftpad != 0) {
      band.first_key = metal::clamp(leftpad[batch_idx], 0, band.seqlen_k);
    }
    // The last query stands at the last key.
    const int seqlen_q = decode.fwd.seqlen_q;
    band.offset = band.seqlen_k - seqlen_q;
    const int right = decode.is_causal != 0 ? 0 : decode.window_right;
    band.begin = decode.window_left < 0 ? -seqlen_q : band.offset - decode.window_left;
    band.end = right < 0 ? band.seqlen_k : metal::min(band.offset + right, band.seqlen_k) + 1;
  }
  return band;
}

// The part of `keys` that one of num_splits reads; empty where there are fewer keys than splits. Whole
// pages of 16 keys, but for the last.
inline IndexRange keys_of_split(IndexRange keys, int split_idx, int num_splits) {
  const int count = metal::max(0, keys.end - keys.begin);
  const int each = ((count + num_splits - 1) / num_splits + 15) / 16 * 16;
  IndexRange part;
  part.begin = metal::min(keys.end, keys.begin + split_idx * each);
  part.end = metal::min(keys.end, part.begin + each);
  return part;
}

// Where a key and its value lie: row `row` of an entry, or of a page; and their scales. An entry outside
// the cache holds no key.
struct KeyPlace {
  int entry;
  int row;
  float k_scale;
  float v_scale;
};

// Whether a place takes a look into a table: one lane finds it then, for all that read the key.
constant bool has_places = is_paged || is_quantized;

inline bool is_place(constant AttnDecodeParams& decode, KeyPlace place) {
  return place.entry >= 0 && place.entry < decode.num_entries;
}

// The place of a key that no table tells.
template <typename KV>
inline KeyPlace plain_place(thread const KeySequence<KV>& keys, int k) {
  KeyPlace place;
  place.entry = keys.entry;
  place.row = k;
  place.k_scale = 1.0f;
  place.v_scale = 1.0f;
  return place;
}

template <typename KV>
inline KeyPlace find_key(
    constant AttnDecodeParams& decode, thread const KeySequence<KV>& keys, int k) {
  KeyPlace place = plain_place(keys, k);
  if (is_paged) {
    const int page = k / decode.page_size;
    place.entry = keys.pages[page];
    place.row = k - page * decode.page_size;
  }
  if (is_quantized && is_place(decode, place)) {
    place.k_scale =
        keys.k_scale[place.entry * decode.k_scale_stride_b + place.row * decode.k_scale_stride_s];
    place.v_scale =
        keys.v_scale[place.entry * decode.v_scale_stride_b + place.row * decode.v_scale_stride_s];
  }
  return place;
}

// The place that lane `lane` found; all lanes take part.
inline KeyPlace place_of_lane(KeyPlace place, int lane) {
  if (is_paged) {
    place.entry = metal::simd_shuffle(place.entry, ushort(lane));
  }
  place.row = metal::simd_shuffle(place.row, ushort(lane));
  if (is_quantized) {
    place.k_scale = metal::simd_shuffle(place.k_scale, ushort(lane));
    place.v_scale = metal::simd_shuffle(place.v_scale, ushort(lane));
  }
  return place;
}

inline int4 pack_place(KeyPlace place) {
  return int4(place.entry, place.row, as_type<int>(place.k_scale), as_type<int>(place.v_scale));
}

inline KeyPlace unpack_place(int4 packed) {
  KeyPlace place;
  place.entry = packed.x;
  place.row = packed.y;
  place.k_scale = as_type<float>(packed.z);
  place.v_scale = as_type<float>(packed.w);
  return place;
}

// The places of keys k_start ... k_end - 1 to threadgroup memory. All THREADS threads take part.
template <typename KV, int THREADS>
inline void stage_places(
    threadgroup int4* places,
    constant AttnDecodeParams& decode,
    thread const KeySequence<KV>& keys,
    int k_start,
    int k_end,
    int thread_idx) {
  for (int i = thread_idx; i < k_end - k_start; i += THREADS) {
    places[i] = pack_place(find_key(decode, keys, k_start + i));
  }
}

template <typename KV>
inline const device KV* key_row(thread const KeyRows<KV>& rows, KeyPlace place) {
  return rows.head + place.entry * rows.stride_b + place.row * rows.stride_s;
}

// Copies the rows of keys k_start ... k_end - 1 to a threadgroup tile, PITCH elements apart and padded
// with zeros. All THREADS threads take part; `places` are those of stage_places().
template <typename KV, int PITCH, int THREADS>
inline void stage_keys(
    threadgroup KV* tile,
    thread const KeyRows<KV>& rows,
    const threadgroup int4* places,
    constant AttnDecodeParams& decode,
    thread const KeySequence<KV>& keys,
    int k_start,
    int k_end,
    int thread_idx) {
  constexpr int kElements = kWideBytes / int(sizeof(KV));
  constexpr int kWords = PITCH / kElements;
  for (int i = thread_idx; i < (k_end - k_start) * kWords; i += THREADS) {
    const int column = i % kWords * kElements;
    const KeyPlace place =
        has_places ? unpack_place(places[i / kWords]) : plain_place(keys, k_start + i / kWords);
    const int columns = is_place(decode, place) ? rows.columns : 0;
    const device KV* row = key_row(rows, place);
    threadgroup KV* to = tile + i / kWords * PITCH + column;
    if (rows.is_wide) {
      *reinterpret_cast<threadgroup uint4*>(to) =
          column < columns ? *reinterpret_cast<const device uint4*>(row + column) : uint4(0);
    } else {
      FLASH_MPS_UNROLL
      for (int e = 0; e < kElements; ++e) {
        to[e] = column + e < columns ? row[column + e] : KV(0);
      }
    }
  }
}

// Copies query rows first_row ... to a threadgroup tile of ROWS x D, zeros beyond the last row and
// column. `query` is the first head of the group.
template <typename T, int ROWS, int D, int THREADS>
inline void stage_queries(
    threadgroup T* tile,
    const device T* query,
    constant AttnDecodeParams& decode,
    int first_row,
    int thread_idx) {
  for (int i = thread_idx; i < ROWS * D; i += THREADS) {
    const int row = first_row + i / D;
    const int column = i % D;
    const int q_idx = row / decode.fwd.group_size;
    const int head_idx = row % decode.fwd.group_size;
    const bool inside = row < decode.num_rows && column < decode.fwd.head_dim;
    tile[i] = inside
                  ? query[q_idx * decode.fwd.q_stride_s + head_idx * decode.fwd.q_stride_h + column]
                  : T(0);
  }
}

// The rows of the mask that query rows read. Rows that share one through a stride of 0 have the same
// index, so that it is read once.
inline int mask_row_index(constant AttnDecodeParams& decode, int row) {
  return row / decode.fwd.group_size * decode.mask_row_q +
         row % decode.fwd.group_size * decode.mask_row_h;
}

struct MaskRows {
  int first;
  int count;
};

inline MaskRows mask_rows_of(constant AttnDecodeParams& decode, int first_row, int last_row) {
  MaskRows rows;
  rows.first = decode.mask_row_q != 0 ? mask_row_index(decode, first_row) : 0;
  rows.count = decode.mask_row_q != 0 ? mask_row_index(decode, last_row) - rows.first + 1
                                      : (decode.mask_row_h != 0 ? decode.fwd.group_size : 1);
  return rows;
}

// Copies those rows for keys k_start ... k_end - 1 to a threadgroup tile, as biases, PITCH keys apart.
// `plane` is the mask_plane() of the group's first head.
template <typename T, int PITCH, int THREADS>
inline void stage_mask(
    threadgroup float* tile,
    const device uchar* plane,
    constant AttnDecodeParams& decode,
    MaskRows rows,
    int k_start,
    int k_end,
    int thread_idx) {
  const int heads = decode.mask_row_h != 0 ? decode.fwd.group_size : 1;
  const int num_keys = k_end - k_start;
  for (int i = thread_idx; i < rows.count * num_keys; i += THREADS) {
    const int row = rows.first + i / num_keys;
    const int k = i % num_keys;
    const int64_t offset = row % heads * decode.fwd.mask_stride_h +
                           row / heads * decode.fwd.mask_stride_q +
                           (k_start + k) * decode.fwd.mask_stride_k;
    tile[i / num_keys * PITCH + k] = mask_bias<T>(plane, offset);
  }
}

}  // namespace flash_mps
