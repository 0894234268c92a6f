#include "kv_cache.h"

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

}  // namespace

void kvcache_append_cpu(FLASH_MPS_KV_APPEND_PARAMETERS) {
  append_on_cpu(append_arguments(FLASH_MPS_KV_APPEND_ARGUMENTS));
}

at::Tensor rotary_embedding_cpu(FLASH_MPS_ROTARY_PARAMETERS) {
  return rotate_on_cpu(x, rotary_arguments(FLASH_MPS_ROTARY_ARGUMENTS));
}

}  // namespace flash_mps
