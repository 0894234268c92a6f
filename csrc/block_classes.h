// The op mask_block_classes, the pre-pass over a mask, and whether a call makes it first.
#pragma once

#include "attn_args.h"

namespace flash_mps {

// uint8 [..., Sq, Sk] in blocks, of an attn_mask [..., Sq, Sk]; a dimension of size 1 stays 1, since it may
// broadcast. Values: BlockClass.
at::Tensor mask_block_classes_mps(const at::Tensor& attn_mask);
at::Tensor mask_block_classes_cpu(const at::Tensor& attn_mask);

// The mask with one element in each dimension that only repeats it.
at::Tensor without_repeats(const at::Tensor& mask);

// Whether a call on so many (query, key) pairs of all heads, which gradients will follow, classifies its
// mask first.
bool classifies_mask(const at::Tensor& mask, double pairs, int64_t head_dims);
// The same of a problem that flash_decode runs, or the other kernels.
bool classifies_mask(const AttnProblem& problem, bool is_decode);

// The problem with block_classes, where it has none and they pay.
AttnProblem with_block_classes(AttnProblem problem, bool is_decode);

}  // namespace flash_mps
