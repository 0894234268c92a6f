// The operands of the ops on a KV cache, judged in one place for every device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "attn_args.h"

namespace flash_mps {

// Keys and values of many sequences. An entry holds the slots of one sequence or, where there is a block
// table, one page of them; slot s of sequence b is then slot s % entry_slots() of page
// block_table[b, s / entry_slots()].
struct KvCache {
  at::Tensor key, value;  // [Bc, Hkv, S_max, D(v)]; paged: [num_pages, Hkv, page_size, D(v)]
  OptionalTensor k_scale, v_scale;  // float32 [Bc, Hkv, S_max] of an int8 cache
  OptionalTensor seqlens, leftpad, cache_batch_idx;  // int32 [B]
  OptionalTensor block_table;  // int32 [B, max_pages_per_seq]

  // Whether sequences differ in more than their place in the batch.
  bool is_indexed() const {
    return seqlens.has_value() || leftpad.has_value() || cache_batch_idx.has_value() ||
           block_table.has_value();
  }
  bool is_int8() const { return key.scalar_type() == at::kChar; }
  int64_t num_entries() const { return key.size(0); }
  int64_t num_heads_kv() const { return key.size(1); }
  int64_t entry_slots() const { return key.size(2); }
  // Slots that a sequence can address.
  int64_t capacity() const {
    return block_table.has_value() ? block_table->size(1) * entry_slots() : entry_slots();
  }
};

// Rotary embedding (Su et al. 2021): row i of sequence b stands at
// seqlens[b] + position - leftpad[b] + i, without i where it does not advance.
struct Rotary {
  at::Tensor cos, sin;  // [seqlen_ro, rotary_dim / 2], float32 or the dtype of the rows
  OptionalTensor seqlens, leftpad;  // int32 [B]
  int64_t position = 0;
  bool is_interleaved = false;  // pairs are neighbours; otherwise rotary_dim / 2 apart
  bool is_advancing = true;

  int64_t seqlen_ro() const { return cos.size(0); }
  int64_t rotary_dim() const { return 2 * cos.size(1); }
};

// New tokens for the slots seqlens[b] + position + i.
struct KvAppend {
  KvCache cache;
  at::Tensor key, value;  // [B, Hkv, S_new, D(v)]
  int64_t position = 0;
  std::optional<Rotary> rotary;  // of the new keys
};

// Attention over a cache. `attention` holds the cache's key and value as they are, [entries, Hkv, S, D],
// and the capacity as its seqlen_k.
struct CachedAttention {
  AttnProblem attention;
  KvCache cache;
  int64_t seqlen_new = 0;  // keys of a sequence beyond seqlens
  int64_t num_splits = 0;  // 0: chosen by the library
};

// Each throws c10::Error "flash_mps::<op>: expected <what>, got <value>", and returns its argument with
// small index tensors made dense.

// `tokens` [B, ., ., D] is the operand of that name whose batch, device and dtype the cache has to fit;
// `suffix` ends the names of seqlens and leftpad in the op's schema.
KvCache check_kv_cache(const char* op, KvCache cache, const at::Tensor& tokens, const char* name,
                       const char* suffix = "");
Rotary check_rotary(const char* op, Rotary rotary, const at::Tensor& rows, const char* name);
KvAppend check_kv_append(const char* op, KvAppend append);
CachedAttention check_cached_attention(const char* op, const at::Tensor& query, KvCache cache,
                                       const AttnOptions& options, int64_t seqlen_new,
                                       int64_t num_splits);

}  // namespace flash_mps
