// The ops on a KV cache on CPU tensors, in plain PyTorch ops.
#pragma once

#include <tuple>

#include "kv_cache_args.h"

namespace flash_mps {

void append_on_cpu(const KvAppend& append);

// x [B, H, S, D] rotated in float32 and rounded once, laid out like x.
at::Tensor rotate_on_cpu(const at::Tensor& x, const Rotary& rotary);

// In the order of the schema of flash_mps::attention_with_kvcache.
std::tuple<at::Tensor, at::Tensor> attention_with_kvcache_cpu(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const OptionalTensor& attn_mask, bool is_causal, std::optional<double> scale,
    const OptionalTensor& k_scale, const OptionalTensor& v_scale, const OptionalTensor& seqlens_k,
    int64_t seqlen_new, const OptionalTensor& leftpad_k, const OptionalTensor& cache_batch_idx,
    const OptionalTensor& block_table, int64_t num_splits);

}  // namespace flash_mps
