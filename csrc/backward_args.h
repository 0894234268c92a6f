// What the backward ops take besides the arguments of their forward ops, judged.
#pragma once

#include <ATen/Functions.h>

#include "attn_args.h"
#include "flash_bwd.h"

namespace flash_mps {

using BackwardKernel = AttnGradients(const char* op, const AttnProblem& problem,
                                     const at::Tensor& out, const at::Tensor& lse,
                                     const at::Tensor& grad_out, const at::Tensor& grad_lse,
                                     WantedGradients wanted);

// Throws unless backward can draw again what forward dropped.
void check_rng_state(const char* op, double dropout_p, const OptionalTensor& rng_state);

// Throws unless the problem has what gradients are asked of.
void check_wanted(const char* op, const AttnProblem& problem, WantedGradients wanted);

// Judges all that flash_bwd() or its like takes, and calls it.
template <BackwardKernel& KERNEL>
AttnGradients checked_backward(const char* op, const AttnProblem& problem, const at::Tensor& out,
                               const at::Tensor& lse, const at::Tensor& grad_out,
                               const at::Tensor& grad_lse, WantedGradients wanted) {
  check_results(op, problem, out, lse, grad_out, grad_lse);
  check_wanted(op, problem, wanted);
  return KERNEL(op, problem, out, lse, grad_out, grad_lse, wanted);
}

// What an op returns in place of a gradient that is not asked for.
inline at::Tensor no_gradient(const at::Tensor& query) {
  return at::empty({0}, query.options());
}

}  // namespace flash_mps
