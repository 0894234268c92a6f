// Packed sequences on the CPU, one after the other, in plain PyTorch ops.
#pragma once

#include <tuple>

#include "attn_args.h"
#include "flash_bwd.h"

namespace flash_mps {

// As attention_cpu() and attention_backward_cpu(), of a problem with packed sequences.
std::tuple<at::Tensor, at::Tensor> packed_attention_cpu(const char* op, const AttnProblem& problem,
                                                        bool has_lse);
AttnGradients packed_attention_backward_cpu(const char* op, const AttnProblem& problem,
                                            const at::Tensor& out, const at::Tensor& lse,
                                            const at::Tensor& grad_out, const at::Tensor& grad_lse,
                                            WantedGradients wanted);

}  // namespace flash_mps
