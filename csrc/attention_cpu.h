// The op on CPU tensors, in plain PyTorch ops.
#pragma once

#include <tuple>

#include "attn_args.h"
#include "flash_bwd.h"

namespace flash_mps {

// out [.., Sq, Dv] and lse [.., Sq] (undefined unless asked for), computed in float32.
std::tuple<at::Tensor, at::Tensor> attention_cpu(const AttnProblem& problem, bool has_lse);

// As flash_bwd.
AttnGradients attention_backward_cpu(const char* op, const AttnProblem& problem,
                                     const at::Tensor& out, const at::Tensor& lse,
                                     const at::Tensor& grad_out, const at::Tensor& grad_lse,
                                     WantedGradients wanted);

}  // namespace flash_mps
