// The op on CPU tensors, in plain PyTorch ops.
#pragma once

#include <tuple>

#include "attn_args.h"

namespace flash_mps {

// out [.., Sq, Dv] and lse [.., Sq] (undefined unless asked for), computed in float32.
std::tuple<at::Tensor, at::Tensor> attention_cpu(const AttnProblem& problem, bool has_lse);

}  // namespace flash_mps
