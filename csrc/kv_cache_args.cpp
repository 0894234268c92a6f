#include "kv_cache_args.h"
#include "mask_args.h"
#include "score_args.h"

#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "../metal/instances.h"

namespace flash_mps {

namespace {

// Pages are read in runs of keys that never cross one.
constexpr int64_t kPageMultiple = 16;

void check_tokens(const char* op, const at::Tensor& tokens, const char* name) {
  FLASH_MPS_CHECK(tokens.dim() == 4, c10::str(name, " of rank 4 ([B, H, S, D])"), "shape ",
                  tokens.sizes());
  const at::ScalarType type = tokens.scalar_type();
  FLASH_MPS_CHECK(type == at::kFloat || type == at::kHalf || type == at::kBFloat16,
                  c10::str(name, " of dtype Float, Half or BFloat16"), type);
}

// An operand of one number for each sequence.
void take_per_sequence(const char* op, OptionalTensor& tensor, const std::string& name,
                       const at::Tensor& tokens) {
  if (!tensor.has_value()) return;
  FLASH_MPS_CHECK(tensor->scalar_type() == at::kInt, c10::str(name, " of dtype Int"),
                  tensor->scalar_type());
  FLASH_MPS_CHECK(tensor->dim() == 1 && tensor->size(0) == tokens.size(0),
                  c10::str(name, " of shape [", tokens.size(0), "]"), tensor->sizes());
  FLASH_MPS_CHECK(tensor->device() == tokens.device(), c10::str(name, " on ", tokens.device()),
                  tensor->device());
  tensor = tensor->contiguous();
}

void check_operand(const char* op, const at::Tensor& cache, const OptionalTensor& scale,
                   const char* name, const char* scale_name, const at::Tensor& tokens) {
  FLASH_MPS_CHECK(cache.dim() == 4, c10::str(name, " of rank 4 ([B, H, S, D], or pages of it)"),
                  "shape ", cache.sizes());
  FLASH_MPS_CHECK(cache.device() == tokens.device(), c10::str(name, " on ", tokens.device()),
                  cache.device());
  FLASH_MPS_CHECK(cache.size(3) > 0, c10::str(name, " with a head_dim of 1 or more"),
                  cache.sizes());
  FLASH_MPS_CHECK(cache.size(3) == 1 || cache.stride(3) == 1,
                  c10::str(name, " with a dense last dimension (a cache is never copied)"),
                  "strides ", cache.strides());
  const bool is_int8 = cache.scalar_type() == at::kChar;
  FLASH_MPS_CHECK(is_int8 || cache.scalar_type() == tokens.scalar_type(),
                  c10::str(name, " of dtype ", tokens.scalar_type(), " or Char"),
                  cache.scalar_type());
  FLASH_MPS_CHECK(
      is_int8 == scale.has_value(),
      c10::str(scale_name, is_int8 ? " with an 8-bit cache" : " with an 8-bit cache only"),
      is_int8 ? "none" : c10::str("a cache of dtype ", cache.scalar_type()));
  if (!is_int8) return;
  const at::IntArrayRef rows = cache.sizes().slice(0, 3);
  FLASH_MPS_CHECK(scale->scalar_type() == at::kFloat, c10::str(scale_name, " of dtype Float"),
                  scale->scalar_type());
  FLASH_MPS_CHECK(scale->sizes() == rows, c10::str(scale_name, " of shape ", rows), scale->sizes());
  FLASH_MPS_CHECK(scale->device() == tokens.device(), c10::str(scale_name, " on ", tokens.device()),
                  scale->device());
}

void take_block_table(const char* op, KvCache& cache, const at::Tensor& tokens) {
  OptionalTensor& table = cache.block_table;
  FLASH_MPS_CHECK(table->scalar_type() == at::kInt, "block_table of dtype Int",
                  table->scalar_type());
  FLASH_MPS_CHECK(table->dim() == 2 && table->size(0) == tokens.size(0),
                  c10::str("block_table of shape [", tokens.size(0), ", max_pages_per_seq]"),
                  table->sizes());
  FLASH_MPS_CHECK(table->device() == tokens.device(), c10::str("block_table on ", tokens.device()),
                  table->device());
  FLASH_MPS_CHECK(!cache.cache_batch_idx.has_value(), "cache_batch_idx or block_table", "both");
  FLASH_MPS_CHECK(cache.entry_slots() > 0 && cache.entry_slots() % kPageMultiple == 0,
                  c10::str("a page size that is a multiple of ", kPageMultiple),
                  cache.entry_slots(), " (key cache ", cache.key.sizes(), ")");
  table = dense_rows(*table);
}

}  // namespace

KvCache check_kv_cache(const char* op, KvCache cache, const at::Tensor& tokens, const char* name,
                       const char* suffix) {
  check_tokens(op, tokens, name);
  check_operand(op, cache.key, cache.k_scale, "key cache", "k_scale", tokens);
  check_operand(op, cache.value, cache.v_scale, "value cache", "v_scale", tokens);
  FLASH_MPS_CHECK(
      cache.key.sizes().slice(0, 3) == cache.value.sizes().slice(0, 3) &&
          cache.key.scalar_type() == cache.value.scalar_type(),
      "key and value cache alike but for their head_dim",
      c10::str("key cache ", cache.key.sizes(), " of ", cache.key.scalar_type(), ", value cache ",
               cache.value.sizes(), " of ", cache.value.scalar_type()));
  FLASH_MPS_CHECK(cache.key.size(3) == tokens.size(3),
                  c10::str("key cache with the head_dim of ", name, ", ", tokens.size(3)),
                  "head_dim ", cache.key.size(3), " (key cache ", cache.key.sizes(), ")");
  take_per_sequence(op, cache.seqlens, c10::str("seqlens", suffix), tokens);
  take_per_sequence(op, cache.leftpad, c10::str("leftpad", suffix), tokens);
  take_per_sequence(op, cache.cache_batch_idx, "cache_batch_idx", tokens);
  const bool is_indexed = cache.cache_batch_idx.has_value() || cache.block_table.has_value();
  FLASH_MPS_CHECK(cache.num_entries() >= (is_indexed ? 1 : tokens.size(0)) || tokens.size(0) == 0,
                  c10::str("a cache of at least ", is_indexed ? 1 : tokens.size(0),
                           is_indexed ? " entry" : " entries, one for each sequence"),
                  cache.num_entries(), " (key cache ", cache.key.sizes(), ")");
  if (cache.block_table.has_value()) take_block_table(op, cache, tokens);
  return cache;
}

Rotary check_rotary(const char* op, Rotary rotary, const at::Tensor& rows, const char* name) {
  check_tokens(op, rows, name);
  const at::Tensor &cos = rotary.cos, &sin = rotary.sin;
  FLASH_MPS_CHECK(cos.dim() == 2 && cos.sizes() == sin.sizes(),
                  "rotary cos and sin of one shape [seqlen_ro, rotary_dim / 2]",
                  c10::str(cos.sizes(), " and ", sin.sizes()));
  FLASH_MPS_CHECK(rotary.rotary_dim() <= rows.size(3),
                  c10::str("a rotary_dim of at most the head_dim of ", name, ", ", rows.size(3)),
                  rotary.rotary_dim());
  const at::ScalarType type = cos.scalar_type();
  FLASH_MPS_CHECK(
      (type == at::kFloat || type == rows.scalar_type()) && sin.scalar_type() == type,
      c10::str("rotary cos and sin of dtype Float or that of ", name, ", ", rows.scalar_type()),
      c10::str(type, " and ", sin.scalar_type()));
  FLASH_MPS_CHECK(cos.device() == rows.device() && sin.device() == rows.device(),
                  c10::str("rotary cos and sin on ", rows.device()),
                  c10::str(cos.device(), " and ", sin.device()));
  take_per_sequence(op, rotary.seqlens, "seqlens", rows);
  take_per_sequence(op, rotary.leftpad, "leftpad", rows);
  if (!rotary.seqlens.has_value() && rows.size(2) > 0) {
    const int64_t last = rotary.position + (rotary.is_advancing ? rows.size(2) - 1 : 0);
    FLASH_MPS_CHECK(last < rotary.seqlen_ro() || rotary.leftpad.has_value(),
                    c10::str("rotary cos and sin of at least ", last + 1, " rows"),
                    rotary.seqlen_ro());
  }
  rotary.cos = dense_rows(cos);
  rotary.sin = dense_rows(sin);
  return rotary;
}

KvAppend check_kv_append(const char* op, KvAppend append) {
  const at::Tensor &key = append.key, &value = append.value;
  append.cache = check_kv_cache(op, append.cache, key, "key");
  const KvCache& cache = append.cache;
  check_tokens(op, value, "value");
  FLASH_MPS_CHECK(value.scalar_type() == key.scalar_type() && value.device() == key.device(),
                  c10::str("value of dtype ", key.scalar_type(), " on ", key.device()),
                  c10::str(value.scalar_type(), " on ", value.device()));
  FLASH_MPS_CHECK(
      value.sizes().slice(0, 3) == key.sizes().slice(0, 3) && value.size(3) == cache.value.size(3),
      c10::str("value of shape [", key.size(0), ", ", key.size(1), ", ", key.size(2), ", ",
               cache.value.size(3), "]"),
      value.sizes());
  FLASH_MPS_CHECK(key.size(1) == cache.num_heads_kv(),
                  c10::str("key with the head count of the cache, ", cache.num_heads_kv(),
                           " (layout [B, H, S, D])"),
                  key.size(1), " (key ", key.sizes(), ")");
  FLASH_MPS_CHECK(append.position >= 0, "position of 0 or more", append.position);
  FLASH_MPS_CHECK(cache.seqlens.has_value() || append.position + key.size(2) <= cache.capacity(),
                  c10::str("room for ", key.size(2), " tokens at slot ", append.position),
                  "a capacity of ", cache.capacity());
  if (append.rotary.has_value()) {
    append.rotary = check_rotary(op, *append.rotary, key, "key");
    FLASH_MPS_CHECK(
        !cache.seqlens.has_value() || append.rotary->seqlen_ro() >= cache.capacity(),
        c10::str("rotary cos and sin of a row for each of ", cache.capacity(), " slots"),
        append.rotary->seqlen_ro());
  }
  append.key = dense_rows(key);
  append.value = dense_rows(value);
  return append;
}

CachedAttention check_cached_attention(const char* op, const at::Tensor& query, KvCache cache,
                                       const AttnOptions& options, int64_t seqlen_new,
                                       int64_t num_splits) {
  check_options(op, options);
  cache = check_kv_cache(op, std::move(cache), query, "query", "_k");
  FLASH_MPS_CHECK(query.size(3) > 0, "a head_dim of 1 or more", query.size(3));
  FLASH_MPS_CHECK(cache.num_heads_kv() > 0 && query.size(1) % cache.num_heads_kv() == 0,
                  "a query head count that is a multiple of the cache's (layout [B, H, S, D])",
                  "query ", query.sizes(), ", key cache ", cache.key.sizes());
  FLASH_MPS_CHECK(seqlen_new >= 0, "seqlen_new of 0 or more", seqlen_new);
  FLASH_MPS_CHECK(num_splits >= 0 && num_splits <= FLASH_DECODE_MAX_SPLITS,
                  c10::str("num_splits between 0 (chosen) and ", FLASH_DECODE_MAX_SPLITS),
                  num_splits);
  FLASH_MPS_CHECK(query.size(2) + cache.capacity() + seqlen_new < std::numeric_limits<int>::max(),
                  "seqlen_q + capacity + seqlen_new below 2^31", query.size(2), " + ",
                  cache.capacity(), " + ", seqlen_new);
  AttnProblem attention;
  attention.query = dense_rows(query);
  attention.key = cache.key;
  attention.value = cache.value;
  attention.is_bshd = query.stride(1) < query.stride(2);
  attention.batch = query.size(0);
  attention.num_heads_q = query.size(1);
  attention.num_heads_kv = cache.num_heads_kv();
  attention.seqlen_q = query.size(2);
  attention.seqlen_k = cache.capacity();
  attention.head_dim = query.size(3);
  attention.head_dim_v = cache.value.size(3);
  attention.type = element_type(op, query.scalar_type());
  take_mask(op, options, attention);
  attention.is_causal = options.is_causal;
  attention.window_left = options.window_left;
  attention.window_right = options.window_right;
  attention.causal_offset = attention.seqlen_k - attention.seqlen_q;
  attention.softmax_scale =
      options.scale.value_or(1.0 / std::sqrt(static_cast<double>(attention.head_dim)));
  take_score_options(op, options, attention);
  return {.attention = std::move(attention),
          .cache = std::move(cache),
          .seqlen_new = seqlen_new,
          .num_splits = num_splits};
}

}  // namespace flash_mps
