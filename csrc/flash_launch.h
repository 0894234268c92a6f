// What every op does on its way to the device: pipelines by key, bindings, splitting of long work.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "attn_args.h"
#include "device.h"

namespace flash_mps {

constexpr uint32_t kSimdWidth = 32;

constexpr int64_t ceil_div(int64_t count, int64_t size) {
  return (count + size - 1) / size;
}

// Throws when there is no Metal device.
Device& require_device(const char* op);

// The pipeline of a key, built the first time; throws with the compiler's text when it cannot be.
const Pipeline* require_pipeline(const char* op, const KernelKey& key);

// Encodes; throws with Metal's text on failure.
void encode(const char* op, std::span<const Launch> launches);

// A tensor's storage and byte offset at a buffer slot.
Binding bind(const at::Tensor& tensor, uint32_t slot);

// The function constants and buffers of a problem's sequences, and of what it does to their scores and
// probabilities.
uint32_t score_constants(const AttnProblem& problem);
void bind_score_buffers(std::vector<Binding>& bindings, const AttnProblem& problem);

// How many blocks of `size` rows cover the queries, or the keys, of every batch entry. Packed sequences
// start a block each, and so does what lies before and after them (metal/sequence.h).
int64_t num_query_blocks(const AttnProblem& problem, int64_t size);
int64_t num_key_blocks(const AttnProblem& problem, int64_t size);

// Gives a launch what else the user-defined functions of a problem, which outlives it, read.
void add_user_layout(Launch& launch, const AttnProblem& problem);

// How many of `num_blocks` one dispatch may hold, for `work` floating-point operations in all.
int64_t blocks_per_dispatch(int64_t num_blocks, double work);

}  // namespace flash_mps
