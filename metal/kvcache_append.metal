// kvcache_append: new keys and values go to their slots of a KV cache, keys turned by their position,
// both as they are or as 8-bit integers with a scale for each token and head.
//
//   for each new token i and head, one simdgroup for the key, one for the value:
//     slot = seqlens[b] + position + i, of entry b, cache_batch_idx[b] or block_table[b, slot / page]
//     x = rotate(row) for the key
//     scale = max |x| / 127;  cache[slot] = round(x / scale)      where the cache is int8
//     cache[slot] = x                                             otherwise
//
// A slot outside the capacity, or in an entry that does not exist, is not written.
//
// Grid: (new tokens, KV heads, batch). Threadgroup: 2 simdgroups. No threadgroup memory.
// Launched by csrc/kv_cache.cpp.

#include "rotary.h"

namespace flash_mps {

constant bool has_batch_idx [[function_constant(kHasBatchIdxConstant)]];
constant bool has_block_table [[function_constant(kHasBlockTableConstant)]];
constant bool is_int8 [[function_constant(kIsInt8Constant)]];

constant constexpr float kMaxInt8 = 127.0f;

// A row as it goes to the cache.
template <typename T>
struct NewRow {
  const device T* elements;
  int64_t position;  // of its rotation
  bool is_rotated;
};

template <typename T>
inline RowChunk<T> new_chunk(
    NewRow<T> row,
    int d,
    constant KvRowParams& own,
    constant RotaryParams& rotary,
    const device uchar* cos,
    const device uchar* sin) {
  RowChunk<T> chunk = load_chunk(row.elements, d, own.head_dim, own.is_wide != 0);
  if (row.is_rotated) {
    rotate_chunk(chunk, row.elements, d, row.position, rotary, cos, sin);
  }
  return chunk;
}

// The bits of the largest absolute value: as integers Inf lies above all numbers, NaN above Inf.
template <typename T>
inline uint largest_bits(RowChunk<T> chunk, uint largest) {
  FLASH_MPS_UNROLL
  for (int i = 0; i < kChunkWidth<T>; ++i) {
    largest = metal::max(largest, as_type<uint>(metal::fabs(chunk.values[i])));
  }
  return largest;
}

// x / scale, rounded to nearest even; 0 where the scale is 0 or no number.
template <typename T>
inline void quantize_chunk(thread RowChunk<T>& chunk, float scale) {
  const bool is_number = scale > 0.0f && scale < INFINITY;
  FLASH_MPS_UNROLL
  for (int i = 0; i < kChunkWidth<T>; ++i) {
    chunk.values[i] = is_number ? metal::rint(chunk.values[i] / scale) : 0.0f;
  }
}

template <typename T>
[[kernel]] void kvcache_append(
    const device T* key [[buffer(kNewKeyBuffer)]],
    const device T* value [[buffer(kNewValueBuffer)]],
    device uchar* key_cache [[buffer(kKeyBuffer)]],
    device uchar* value_cache [[buffer(kValueBuffer)]],
    device float* k_scale [[buffer(kKeyScaleBuffer), function_constant(is_int8)]],
    device float* v_scale [[buffer(kValueScaleBuffer), function_constant(is_int8)]],
    const device int* cache_batch_idx [[buffer(kBatchIdxBuffer), function_constant(has_batch_idx)]],
    const device int* block_table [[buffer(kBlockTableBuffer), function_constant(has_block_table)]],
    const device int* seqlens [[buffer(kSeqlensBuffer), function_constant(has_seqlens)]],
    const device int* leftpad [[buffer(kLeftpadBuffer), function_constant(has_leftpad)]],
    const device uchar* cos [[buffer(kCosBuffer), function_constant(has_rotary)]],
    const device uchar* sin [[buffer(kSinBuffer), function_constant(has_rotary)]],
    constant KvAppendParams& params [[buffer(kParamsBuffer)]],
    uint3 block [[threadgroup_position_in_grid]],
    uint simdgroup_idx [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const int token_idx = int(block.x), head_idx = int(block.y), batch_idx = int(block.z);
  const bool is_key = simdgroup_idx == 0;

  // Locate the slot.
  const int64_t slot =
      params.position + token_idx + (has_seqlens ? int64_t(seqlens[batch_idx]) : 0);
  if (slot < 0 || slot >= params.capacity) {
    return;
  }
  int64_t entry_idx = batch_idx;
  if (has_block_table) {
    entry_idx = block_table[batch_idx * params.block_table_stride_b + slot / params.entry_slots];
  } else if (has_batch_idx) {
    entry_idx = cache_batch_idx[batch_idx];
  }
  if (entry_idx < 0 || entry_idx >= params.num_entries) {
    return;
  }
  const int64_t slot_in_entry = slot % params.entry_slots;

  // Locate the row.
  constant KvRowParams& own = is_key ? params.key : params.value;
  NewRow<T> row;
  row.elements = (is_key ? key : value) + batch_idx * own.stride_b + head_idx * own.stride_h +
                 token_idx * own.stride_s;
  row.position = slot - (has_leftpad ? int64_t(leftpad[batch_idx]) : 0);
  row.is_rotated = has_rotary && is_key;
  const int64_t target = entry_idx * own.cache_stride_b + head_idx * own.cache_stride_h +
                         slot_in_entry * own.cache_stride_s;
  device uchar* cache = is_key ? key_cache : value_cache;
  const int first = int(lane) * kChunkWidth<T>;
  constexpr int kStep = kSimdWidth * kChunkWidth<T>;

  if (!is_int8) {
    device T* slot_row = reinterpret_cast<device T*>(cache) + target;
    for (int d = first; d < own.head_dim; d += kStep) {
      const RowChunk<T> chunk = new_chunk(row, d, own, params.rotary, cos, sin);
      store_chunk(chunk, slot_row, d, own.head_dim, own.is_wide != 0);
    }
    return;
  }

  // scale = max |x| / 127. A number that a GPU takes for 0 is 0.
  uint largest = 0;
  for (int d = first; d < own.head_dim; d += kStep) {
    largest = largest_bits(new_chunk(row, d, own, params.rotary, cos, sin), largest);
  }
  float scale = as_type<float>(metal::simd_max(largest)) / kMaxInt8;
  scale = scale < FLT_MIN ? 0.0f : scale;
  if (lane == 0) {
    const int64_t at = entry_idx * own.scale_stride_b + head_idx * own.scale_stride_h +
                       slot_in_entry * own.scale_stride_s;
    (is_key ? k_scale : v_scale)[at] = scale;
  }
  device char* slot_row = reinterpret_cast<device char*>(cache) + target;
  for (int d = first; d < own.head_dim; d += kStep) {
    RowChunk<T> chunk = new_chunk(row, d, own, params.rotary, cos, sin);
    quantize_chunk(chunk, scale);
    store_int8_chunk(chunk, slot_row, d, own.head_dim, own.is_wide != 0);
  }
}

}  // namespace flash_mps
