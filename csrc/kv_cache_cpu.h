// The ops on a KV cache on CPU tensors, in plain PyTorch ops.
#pragma once

#include <tuple>

#include "kv_cache.h"

namespace flash_mps {

void append_on_cpu(const KvAppend& append);

// x [B, H, S, D] rotated in float32 and rounded once, laid out like x.
at::Tensor rotate_on_cpu(const at::Tensor& x, const Rotary& rotary);

// The op flash_mps::attention_with_kvcache.
std::tuple<at::Tensor, at::Tensor> attention_with_kvcache_cpu(FLASH_MPS_WITH_KVCACHE_PARAMETERS);

}  // namespace flash_mps
