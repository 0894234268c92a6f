#include "kv_cache.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "../metal/kv_cache_params.h"
#include "flash_launch.h"
#include "kv_cache_cpu.h"

namespace flash_mps {

namespace {

constexpr const char* kAppend = "kvcache_append_";
constexpr const char* kRotary = "rotary_embedding";

KvAppend append_arguments(FLASH_MPS_KV_APPEND_PARAMETERS) {
  KvAppend append = {
      .cache = {.key = key_cache,
                .value = value_cache,
                .k_scale = k_scale,
                .v_scale = v_scale,
                .seqlens = seqlens,
                .leftpad = leftpad,
                .cache_batch_idx = cache_batch_idx,
                .block_table = block_table},
      .key = key,
      .value = value,
      .position = position,
  };
  TORCH_CHECK(rotary_cos.has_value() == rotary_sin.has_value(), "flash_mps::", kAppend,
              ": expected both rotary_cos and rotary_sin or none, got one");
  if (rotary_cos.has_value()) {
    append.rotary = Rotary{.cos = *rotary_cos,
                           .sin = *rotary_sin,
                           .seqlens = seqlens,
                           .leftpad = leftpad,
                           .position = position,
                           .is_interleaved = rotary_interleaved};
  }
  return check_kv_append(kAppend, append);
}

Rotary rotary_arguments(FLASH_MPS_ROTARY_PARAMETERS) {
  const Rotary rotary = {.cos = cos,
                         .sin = sin,
                         .seqlens = seqlens,
                         .leftpad = leftpad,
                         .position = position,
                         .is_interleaved = interleaved,
                         .is_advancing = is_advancing};
  return check_rotary(kRotary, rotary, x, "x");
}

uint32_t rotary_constants(const Rotary& rotary) {
  return constant_bit(kIsInterleavedConstant, rotary.is_interleaved) |
         constant_bit(kHasFloatTableConstant, rotary.cos.scalar_type() == at::kFloat);
}

void bind_optional(std::vector<Binding>& bindings, const OptionalTensor& tensor, uint32_t slot) {
  if (tensor.has_value()) bindings.push_back(bind(*tensor, slot));
}

RotaryParams make_rotary_params(const Rotary& rotary) {
  const auto last = std::numeric_limits<int32_t>::max();
  return {
      .cos_stride_s = rotary.cos.stride(0),
      .sin_stride_s = rotary.sin.stride(0),
      .seqlen_ro = static_cast<int32_t>(std::min<int64_t>(rotary.seqlen_ro(), last)),
      .rotary_dim = static_cast<int32_t>(rotary.rotary_dim()),
  };
}

KvRowParams make_row_params(const at::Tensor& rows, const at::Tensor& cache,
                            const OptionalTensor& scale) {
  const auto scale_stride = [&](int64_t dim) { return scale.has_value() ? scale->stride(dim) : 0; };
  return {
      .stride_b = rows.stride(0),
      .stride_h = rows.stride(1),
      .stride_s = rows.stride(2),
      .cache_stride_b = cache.stride(0),
      .cache_stride_h = cache.stride(1),
      .cache_stride_s = cache.stride(2),
      .scale_stride_b = scale_stride(0),
      .scale_stride_h = scale_stride(1),
      .scale_stride_s = scale_stride(2),
      .head_dim = static_cast<int32_t>(rows.size(3)),
      .is_wide = has_wide_rows(rows) && has_wide_rows(cache),
  };
}

// One simdgroup for each row of each operand.
void launch_rows(const char* op, const KernelKey& key, const std::vector<Binding>& bindings,
                 const auto& params, const at::Tensor& rows, uint32_t num_operands) {
  const Launch launch = {
      .pipeline = require_pipeline(op, key),
      .bindings = bindings,
      .params = &params,
      .params_bytes = sizeof(params),
      .params_slot = kParamsBuffer,
      .grid = {static_cast<uint32_t>(rows.size(2)), static_cast<uint32_t>(rows.size(1)),
               static_cast<uint32_t>(rows.size(0))},
      .threads = num_operands * kSimdWidth,
  };
  encode(op, {&launch, 1});
}

void launch_append(const KvAppend& append) {
  const KvCache& cache = append.cache;
  KernelKey kernel = {
      .op = Op::KvcacheAppend,
      .type = element_type(kAppend, append.key.scalar_type()),
      .constants = constant_bit(kHasSeqlensConstant, cache.seqlens.has_value()) |
                   constant_bit(kHasLeftpadConstant, cache.leftpad.has_value()) |
                   constant_bit(kHasBatchIdxConstant, cache.cache_batch_idx.has_value()) |
                   constant_bit(kHasBlockTableConstant, cache.block_table.has_value()) |
                   constant_bit(kIsInt8Constant, cache.is_int8()) |
                   constant_bit(kHasRotaryConstant, append.rotary.has_value()),
  };
  std::vector<Binding> bindings = {bind(append.key, kNewKeyBuffer),
                                   bind(append.value, kNewValueBuffer), bind(cache.key, kKeyBuffer),
                                   bind(cache.value, kValueBuffer)};
  bind_optional(bindings, cache.k_scale, kKeyScaleBuffer);
  bind_optional(bindings, cache.v_scale, kValueScaleBuffer);
  bind_optional(bindings, cache.seqlens, kSeqlensBuffer);
  bind_optional(bindings, cache.leftpad, kLeftpadBuffer);
  bind_optional(bindings, cache.cache_batch_idx, kBatchIdxBuffer);
  bind_optional(bindings, cache.block_table, kBlockTableBuffer);
  KvAppendParams params = {
      .key = make_row_params(append.key, cache.key, cache.k_scale),
      .value = make_row_params(append.value, cache.value, cache.v_scale),
      .position = append.position,
      .capacity = cache.capacity(),
      .block_table_stride_b = cache.block_table.has_value() ? cache.block_table->stride(0) : 0,
      .num_entries = cache.num_entries(),
      .entry_slots = cache.entry_slots(),
  };
  if (append.rotary.has_value()) {
    kernel.constants |= rotary_constants(*append.rotary);
    params.rotary = make_rotary_params(*append.rotary);
    bindings.push_back(bind(append.rotary->cos, kCosBuffer));
    bindings.push_back(bind(append.rotary->sin, kSinBuffer));
  }
  launch_rows(kAppend, kernel, bindings, params, append.key, 2);
}

void launch_rotary(const at::Tensor& x, const at::Tensor& out, const Rotary& rotary) {
  const KernelKey kernel = {
      .op = Op::RotaryEmbedding,
      .type = element_type(kRotary, x.scalar_type()),
      .constants = constant_bit(kHasSeqlensConstant, rotary.seqlens.has_value()) |
                   constant_bit(kHasLeftpadConstant, rotary.leftpad.has_value()) |
                   constant_bit(kHasRotaryConstant, true) | rotary_constants(rotary),
  };
  std::vector<Binding> bindings = {bind(x, kQueryBuffer), bind(out, kOutBuffer),
                                   bind(rotary.cos, kCosBuffer), bind(rotary.sin, kSinBuffer)};
  bind_optional(bindings, rotary.seqlens, kSeqlensBuffer);
  bind_optional(bindings, rotary.leftpad, kLeftpadBuffer);
  const RotaryEmbeddingParams params = {
      .rotary = make_rotary_params(rotary),
      .x_stride_b = x.stride(0),
      .x_stride_h = x.stride(1),
      .x_stride_s = x.stride(2),
      .out_stride_b = out.stride(0),
      .out_stride_h = out.stride(1),
      .out_stride_s = out.stride(2),
      .position = rotary.position,
      .head_dim = static_cast<int32_t>(x.size(3)),
      .is_wide = has_wide_rows(x) && has_wide_rows(out),
      .is_advancing = rotary.is_advancing,
  };
  launch_rows(kRotary, kernel, bindings, params, x, 1);
}

}  // namespace

CachedAttention cached_attention_arguments(FLASH_MPS_WITH_KVCACHE_PARAMETERS) {
  const KvCache cache = {.key = key,
                         .value = value,
                         .k_scale = k_scale,
                         .v_scale = v_scale,
                         .seqlens = seqlens_k,
                         .leftpad = leftpad_k,
                         .cache_batch_idx = cache_batch_idx,
                         .block_table = block_table};
  return check_cached_attention("attention_with_kvcache", query, cache,
                                {.attn_mask = attn_mask,
                                 .is_causal = is_causal,
                                 .scale = scale,
                                 .window_left = window_left,
                                 .window_right = window_right,
                                 .softcap = softcap,
                                 .alibi_slopes = alibi_slopes,
                                 .sinks = sinks},
                                seqlen_new, num_splits);
}

void kvcache_append_mps(FLASH_MPS_KV_APPEND_PARAMETERS) {
  const KvAppend append = append_arguments(FLASH_MPS_KV_APPEND_ARGUMENTS);
  if (append.key.numel() > 0 && append.cache.capacity() > 0) launch_append(append);
}

void kvcache_append_cpu(FLASH_MPS_KV_APPEND_PARAMETERS) {
  append_on_cpu(append_arguments(FLASH_MPS_KV_APPEND_ARGUMENTS));
}

at::Tensor rotary_embedding_mps(FLASH_MPS_ROTARY_PARAMETERS) {
  const Rotary rotary = rotary_arguments(FLASH_MPS_ROTARY_ARGUMENTS);
  if (rotary.cos.numel() == 0) return empty_rows_like(dense_rows(x)).copy_(x);
  const at::Tensor rows = dense_rows(x);
  const at::Tensor out = empty_rows_like(rows);
  if (out.numel() > 0) launch_rotary(rows, out, rotary);
  return out;
}

at::Tensor rotary_embedding_cpu(FLASH_MPS_ROTARY_PARAMETERS) {
  return rotate_on_cpu(x, rotary_arguments(FLASH_MPS_ROTARY_ARGUMENTS));
}

}  // namespace flash_mps
