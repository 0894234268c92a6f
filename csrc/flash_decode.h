// Attention of few queries, or over a KV cache, on an MPS device.
#pragma once

#include <optional>
#include <string>
#include <tuple>

#include "kv_cache_args.h"

namespace flash_mps {

// How a problem would run.
struct FlashDecodePlan {
  KernelKey key;
  int64_t num_rows;  // that read one KV head
  int64_t row_tiles;  // of a threadgroup
  int64_t num_row_blocks;
  int64_t row_blocks_per_dispatch;
  int64_t num_splits;

  // Floats that the splits hand to the combine pass.
  int64_t scratch_size(const AttnProblem& problem) const {
    return num_splits > 1 ? num_splits * problem.total_rows() * (problem.head_dim_v + 2) : 0;
  }
};

// Whether attention on plain tensors runs flash_decode and not flash_fwd: of up to 16 queries. A
// query block of flash_fwd holds 16 or 32 rows of one head, and reads K and V for that head alone. Up to
// 16 rows would leave much of it empty, and each head of a group would read the same K and V again,
// which is what such a call spends its time on. Not where a gradient is wanted: backward computes the
// scores again in flash_fwd's way, and lse should have the rounding of those. Nor with dropout, which only
// flash_fwd has.
bool runs_decode(const AttnProblem& problem);

// Bytes of K and V that the kernel reads whether or not a row sees their keys, unless the classes of the
// mask's blocks tell it.
double unconditional_key_bytes(const AttnProblem& problem);

// Why the kernel cannot run this problem; nothing when it can.
std::optional<std::string> flash_decode_unsupported(const AttnProblem& problem);

FlashDecodePlan plan_flash_decode(const AttnProblem& problem, const CachedAttention* cached,
                                  GpuFamily family, int gpu_cores, bool has_lse);

// Fills out [B, Hq, Sq, Dv] and lse [B, Hq, Sq] (unless undefined), which have elements; `cached` is
// what holds the problem, or null for plain tensors. Encodes; never commits or waits.
void flash_decode(const char* op, const AttnProblem& problem, const CachedAttention* cached,
                  const at::Tensor& out, const at::Tensor& lse);

// The op attention_with_kvcache: out and lse.
std::tuple<at::Tensor, at::Tensor> flash_decode_cached(const char* op,
                                                       const CachedAttention& cached);

}  // namespace flash_mps
