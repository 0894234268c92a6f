// rotary_embedding: rows turned by their position.
//
//   for each row, one simdgroup:
//     position = seqlens[b] + position - leftpad[b] (+ i)
//     for each pair: (a, b) = (a cos - b sin, b cos + a sin)
//
// Grid: (rows, heads, batch). Threadgroup: 1 simdgroup. No threadgroup memory.
// Launched by csrc/kv_cache.cpp.

#include "rotary.h"

namespace flash_mps {

template <typename T>
[[kernel]] void rotary_embedding(
    const device T* x [[buffer(kQueryBuffer)]],
    device T* out [[buffer(kOutBuffer)]],
    const device int* seqlens [[buffer(kSeqlensBuffer), function_constant(has_seqlens)]],
    const device int* leftpad [[buffer(kLeftpadBuffer), function_constant(has_leftpad)]],
    const device uchar* cos [[buffer(kCosBuffer)]],
    const device uchar* sin [[buffer(kSinBuffer)]],
    constant RotaryEmbeddingParams& params [[buffer(kParamsBuffer)]],
    uint3 block [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  const int row_idx = int(block.x), head_idx = int(block.y), batch_idx = int(block.z);
  int64_t position = params.position + (params.is_advancing != 0 ? row_idx : 0);
  if (has_seqlens) {
    position += seqlens[batch_idx];
  }
  if (has_leftpad) {
    position -= leftpad[batch_idx];
  }
  const device T* row = x + batch_idx * params.x_stride_b + head_idx * params.x_stride_h +
                        row_idx * params.x_stride_s;
  device T* out_row = out + batch_idx * params.out_stride_b + head_idx * params.out_stride_h +
                      row_idx * params.out_stride_s;
  const bool is_wide = params.is_wide != 0;
  for (int d = int(lane) * kChunkWidth<T>; d < params.head_dim; d += kSimdWidth * kChunkWidth<T>) {
    RowChunk<T> chunk = load_chunk(row, d, params.head_dim, is_wide);
    rotate_chunk(chunk, row, d, position, params.rotary, cos, sin);
    store_chunk(chunk, out_row, d, params.head_dim, is_wide);
  }
}

}  // namespace flash_mps
