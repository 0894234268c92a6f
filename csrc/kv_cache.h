// The ops that write a KV cache, at each device.
#pragma once

#include <ATen/core/Tensor.h>

#include "kv_cache_args.h"

namespace flash_mps {

// In the order of the schemas.
#define FLASH_MPS_WITH_KVCACHE_PARAMETERS                                                   \
  const at::Tensor &query, const at::Tensor &key, const at::Tensor &value,                  \
      const OptionalTensor &attn_mask, bool is_causal, std::optional<double> scale,         \
      const OptionalTensor &k_scale, const OptionalTensor &v_scale,                         \
      const OptionalTensor &seqlens_k, int64_t seqlen_new, const OptionalTensor &leftpad_k, \
      const OptionalTensor &cache_batch_idx, const OptionalTensor &block_table,             \
      int64_t num_splits, int64_t window_left, int64_t window_right, double softcap,        \
      const OptionalTensor &alibi_slopes, const OptionalTensor &sinks
#define FLASH_MPS_WITH_KVCACHE_ARGUMENTS                                                       \
  query, key, value, attn_mask, is_causal, scale, k_scale, v_scale, seqlens_k, seqlen_new,     \
      leftpad_k, cache_batch_idx, block_table, num_splits, window_left, window_right, softcap, \
      alibi_slopes, sinks
#define FLASH_MPS_KV_APPEND_PARAMETERS                                                       \
  const at::Tensor &key_cache, const at::Tensor &value_cache, const at::Tensor &key,         \
      const at::Tensor &value, const OptionalTensor &k_scale, const OptionalTensor &v_scale, \
      const OptionalTensor &seqlens, int64_t position, const OptionalTensor &leftpad,        \
      const OptionalTensor &cache_batch_idx, const OptionalTensor &block_table,              \
      const OptionalTensor &rotary_cos, const OptionalTensor &rotary_sin, bool rotary_interleaved
#define FLASH_MPS_KV_APPEND_ARGUMENTS                                               \
  key_cache, value_cache, key, value, k_scale, v_scale, seqlens, position, leftpad, \
      cache_batch_idx, block_table, rotary_cos, rotary_sin, rotary_interleaved
#define FLASH_MPS_ROTARY_PARAMETERS                                                   \
  const at::Tensor &x, const at::Tensor &cos, const at::Tensor &sin,                  \
      const OptionalTensor &seqlens, int64_t position, const OptionalTensor &leftpad, \
      bool interleaved, bool is_advancing
#define FLASH_MPS_ROTARY_ARGUMENTS \
  x, cos, sin, seqlens, position, leftpad, interleaved, is_advancing

// check_cached_attention() of the arguments of attention_with_kvcache.
CachedAttention cached_attention_arguments(FLASH_MPS_WITH_KVCACHE_PARAMETERS);

// Writes key and value [B, Hkv, S_new, D(v)] to the slots seqlens[b] + position + i of a KvCache, the
// keys rotated, both as 8-bit integers where the cache is. A slot at or beyond the capacity, of an entry
// or of a page that does not exist, is not written; where the slots are known here (no seqlens), that
// is an error and nothing is written. No other slot changes.
void kvcache_append_mps(FLASH_MPS_KV_APPEND_PARAMETERS);
void kvcache_append_cpu(FLASH_MPS_KV_APPEND_PARAMETERS);
// x [B, H, S, D] rotated by position (see Rotary) in float32 and rounded once; the elements from
// rotary_dim on are as they were. Before position 0 nothing rotates; beyond the tables there is no
// result, which is NaN, or an error where the positions are known here.
at::Tensor rotary_embedding_mps(FLASH_MPS_ROTARY_PARAMETERS);
at::Tensor rotary_embedding_cpu(FLASH_MPS_ROTARY_PARAMETERS);

}  // namespace flash_mps
