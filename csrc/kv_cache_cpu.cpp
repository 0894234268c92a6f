#include "kv_cache_cpu.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <limits>

#include "attention_cpu.h"

namespace flash_mps {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kMaxInt8 = 127.0;

// int64 [B, 1]; `fallback` where there is no tensor.
at::Tensor per_sequence(const OptionalTensor& tensor, int64_t batch, int64_t fallback) {
  if (!tensor.has_value()) return at::full({batch, 1}, fallback, at::kLong);
  return tensor->to(at::kLong).unsqueeze(1);
}

// The entries of each sequence, int64 [B, entries of a sequence]: its pages, or the one that it reads.
at::Tensor entries(const KvCache& cache, int64_t batch) {
  if (cache.block_table.has_value()) return cache.block_table->to(at::kLong);
  if (cache.cache_batch_idx.has_value()) return cache.cache_batch_idx->to(at::kLong).unsqueeze(1);
  return at::arange(batch, at::kLong).unsqueeze(1);
}

at::Tensor is_entry(const KvCache& cache, const at::Tensor& entry) {
  return (entry >= 0).logical_and_(entry < cache.num_entries());
}

// A tensor of the cache [entries, H, slots, ...] -> [B, H, capacity, ...].
at::Tensor gather(const KvCache& cache, const at::Tensor& tensor, int64_t batch) {
  if (!cache.block_table.has_value() && !cache.cache_batch_idx.has_value()) {
    return tensor.narrow(0, 0, batch);
  }
  const at::Tensor index = entries(cache, batch);
  const int64_t last = std::max<int64_t>(cache.num_entries() - 1, 0);
  return tensor.index_select(0, index.clamp(0, last).flatten())
      .unflatten(0, index.sizes())
      .transpose(1, 2)
      .flatten(2, 3);
}

at::Tensor dequantised(const KvCache& cache, const at::Tensor& tensor, const OptionalTensor& scale,
                       int64_t batch) {
  const at::Tensor gathered = gather(cache, tensor, batch);
  if (!scale.has_value()) return gathered;
  return gathered.to(at::kFloat).mul_(gather(cache, *scale, batch).unsqueeze(-1));
}

// How many keys each sequence has: int64 [B, 1].
at::Tensor seqlens_k(const CachedAttention& cached) {
  const int64_t batch = cached.attention.batch, capacity = cached.cache.capacity();
  return (per_sequence(cached.cache.seqlens, batch, capacity) + cached.seqlen_new)
      .clamp_max_(capacity);
}

// How far key j is ahead of query i, the last of which stands at the last key: int64 [B, 1, Sq, Sk].
at::Tensor distances(const CachedAttention& cached) {
  const int64_t seqlen_q = cached.attention.seqlen_q;
  const at::Tensor position =
      (seqlens_k(cached) - seqlen_q + at::arange(seqlen_q, at::kLong)).unsqueeze(1).unsqueeze(-1);
  return at::arange(cached.cache.capacity(), at::kLong) - position;
}

// Which keys the lengths, the pages, the causal rule and the window let each query see: bool
// [B, 1, Sq, Sk].
at::Tensor visible_keys(const CachedAttention& cached, const at::Tensor& distance) {
  const KvCache& cache = cached.cache;
  const AttnProblem& attention = cached.attention;
  const int64_t batch = attention.batch;
  const at::Tensor j = at::arange(cache.capacity(), at::kLong);
  at::Tensor keys =
      (j < seqlens_k(cached)).logical_and_(j >= per_sequence(cache.leftpad, batch, 0));
  keys.logical_and_(
      is_entry(cache, entries(cache, batch)).repeat_interleave(cache.entry_slots(), 1));
  at::Tensor visible = keys.unsqueeze(1).unsqueeze(1).logical_and(distance == distance);
  const int64_t right = attention.is_causal ? 0 : attention.window_right;
  if (right >= 0) visible.logical_and_(distance <= right);
  if (attention.window_left >= 0) visible.logical_and_(distance >= -attention.window_left);
  return visible;
}

// Rows of a table [seqlen_ro, rotary_dim / 2] -> float32 [B, 1, S, rotary_dim / 2]. Before the first
// row stands `before`; a position beyond the last one has no value.
at::Tensor table_rows(const at::Tensor& table, const at::Tensor& positions, double before) {
  const int64_t last = std::max<int64_t>(table.size(0) - 1, 0);
  const at::Tensor padded = at::constant_pad_nd(table.to(at::kFloat), {0, 0, 0, 1});
  return padded.index_select(0, positions.clamp(0, last + 1).flatten())
      .unflatten(0, positions.sizes())
      .masked_fill_((positions < 0).unsqueeze(-1), before)
      .masked_fill_((positions > last).unsqueeze(-1), std::numeric_limits<double>::quiet_NaN())
      .unsqueeze(1);
}

// float32 [B, H, S, D]
at::Tensor rotated(const at::Tensor& x, const Rotary& rotary) {
  const int64_t batch = x.size(0), width = rotary.rotary_dim(), half = width / 2;
  at::Tensor positions = per_sequence(rotary.seqlens, batch, 0) + rotary.position -
                         per_sequence(rotary.leftpad, batch, 0);
  positions = rotary.is_advancing ? positions + at::arange(x.size(2), at::kLong)
                                  : positions.expand({-1, x.size(2)});
  const at::Tensor cos = table_rows(rotary.cos, positions, 1.0);
  const at::Tensor sin = table_rows(rotary.sin, positions, 0.0);
  const at::Tensor wide = x.to(at::kFloat);
  const at::Tensor pairs = rotary.is_interleaved
                               ? wide.narrow(3, 0, width).unflatten(3, {half, 2})
                               : wide.narrow(3, 0, width).unflatten(3, {2, half}).transpose(3, 4);
  const at::Tensor a = pairs.select(4, 0), b = pairs.select(4, 1);
  const at::Tensor turned = at::stack({a * cos - b * sin, b * cos + a * sin}, 4);
  const at::Tensor front = (rotary.is_interleaved ? turned : turned.transpose(3, 4)).flatten(3);
  return at::cat({front, wide.narrow(3, width, x.size(3) - width)}, 3);
}

// Rows of 8-bit integers and their scales.
std::tuple<at::Tensor, at::Tensor> quantize_rows(const at::Tensor& rows) {
  const at::Tensor wide = rows.to(at::kFloat);
  at::Tensor scale = wide.abs().amax(-1).div_(kMaxInt8);
  // A number that a GPU takes for 0 is 0.
  scale.masked_fill_(scale < std::numeric_limits<float>::min(), 0.0);
  const at::Tensor divisor = scale.masked_fill(scale == 0.0, 1.0).unsqueeze(-1);
  const at::Tensor has_values = scale.isfinite().logical_and_(scale != 0.0).unsqueeze(-1);
  const at::Tensor steps = at::round(wide / divisor).masked_fill_(has_values.logical_not(), 0.0);
  return {steps.to(at::kChar), scale};
}

// Writes rows [N, H, D] to the slots that `where` addresses.
void store(const at::Tensor& cache, const OptionalTensor& scale, const at::Tensor& rows,
           const c10::List<OptionalTensor>& where) {
  const at::Tensor slots = cache.transpose(1, 2);
  if (!scale.has_value()) {
    slots.index_put_(where, rows.to(cache.scalar_type()));
    return;
  }
  const auto [quantised, scales] = quantize_rows(rows);
  slots.index_put_(where, quantised);
  scale->transpose(1, 2).index_put_(where, scales);
}

}  // namespace

void append_on_cpu(const KvAppend& append) {
  const KvCache& cache = append.cache;
  const int64_t batch = append.key.size(0), num_new = append.key.size(2);
  if (append.key.size(1) == 0 || batch == 0 || num_new == 0) return;
  const at::Tensor slot =
      per_sequence(cache.seqlens, batch, 0) + append.position + at::arange(num_new, at::kLong);
  at::Tensor is_addressed = (slot >= 0).logical_and_(slot < cache.capacity());
  const int64_t entry_slots = std::max<int64_t>(cache.entry_slots(), 1);
  const at::Tensor table = entries(cache, batch);
  if (table.size(1) == 0) return;
  const at::Tensor place = at::div(slot, entry_slots, "floor").clamp_(0, table.size(1) - 1);
  const at::Tensor entry = table.gather(1, place);
  is_addressed.logical_and_(is_entry(cache, entry));
  const auto picked = [&](const at::Tensor& index) { return index.masked_select(is_addressed); };
  c10::List<OptionalTensor> where;
  where.push_back(picked(entry));
  where.push_back(picked(slot.remainder(entry_slots)));
  const auto rows = [&](const at::Tensor& tokens) {
    const at::Tensor indices = is_addressed.flatten().nonzero().squeeze(1);
    return tokens.transpose(1, 2).flatten(0, 1).index_select(0, indices);
  };
  const at::Tensor key =
      append.rotary.has_value() ? rotated(append.key, *append.rotary) : append.key;
  store(cache.key, cache.k_scale, rows(key), where);
  store(cache.value, cache.v_scale, rows(append.value), where);
}

at::Tensor rotate_on_cpu(const at::Tensor& x, const Rotary& rotary) {
  return empty_rows_like(dense_rows(x)).copy_(rotated(x, rotary));
}

std::tuple<at::Tensor, at::Tensor> attention_with_kvcache_cpu(FLASH_MPS_WITH_KVCACHE_PARAMETERS) {
  const CachedAttention cached = cached_attention_arguments(FLASH_MPS_WITH_KVCACHE_ARGUMENTS);
  const KvCache& cache = cached.cache;
  AttnProblem problem = cached.attention;
  problem.key = dequantised(cache, cache.key, cache.k_scale, problem.batch);
  problem.value = dequantised(cache, cache.value, cache.v_scale, problem.batch);
  // Positions differ from sequence to sequence: the mask says all that depends on them.
  const at::Tensor distance = distances(cached);
  const at::Tensor hidden = visible_keys(cached, distance).logical_not();
  at::Tensor bias = at::zeros({1, 1, 1, 1}, at::kFloat);
  if (problem.alibi_slopes.defined()) {
    bias = -(problem.alibi_slopes.unsqueeze(-1).unsqueeze(-1) * distance.abs().to(at::kFloat));
  }
  if (problem.mask_kind == kBoolMask) {
    bias = bias.masked_fill(problem.mask.logical_not(), -kInfinity);
  } else if (problem.mask_kind != kNoMask) {
    bias = bias + problem.mask.to(at::kFloat);
  }
  problem.mask = bias.masked_fill(hidden, -kInfinity);
  problem.mask_kind = kFloatMask;
  problem.is_causal = false;
  problem.window_left = problem.window_right = -1;
  problem.alibi_slopes = at::Tensor();
  return attention_cpu(problem, /*has_lse=*/true);
}

}  // namespace flash_mps
