// The mask of a call and what is known of its blocks. Part of attn_args.h's judgement of inputs.
#pragma once

#include "attn_args.h"

namespace flash_mps {

// Fills mask, mask_kind and block_classes of a problem whose sizes are known. Throws like check_inputs().
void take_mask(const char* op, const AttnOptions& options, AttnProblem& problem);

// Fills block_classes of one likewise.
void take_block_classes(const char* op, const at::Tensor& classes, AttnProblem& problem);

// The kind of a mask for queries of a dtype; throws for a dtype that it may not have.
MaskKind mask_kind(const char* op, at::ScalarType mask_type, at::ScalarType query_type);

// A dimension of so many elements in blocks; one that may broadcast stays 1.
constexpr int64_t num_class_blocks(int64_t size) {
  return (size + FLASH_MPS_CLASS_BLOCK - 1) / FLASH_MPS_CLASS_BLOCK;
}

}  // namespace flash_mps
