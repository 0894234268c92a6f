// The backward op on an MPS device.
#pragma once

#include <array>
#include <optional>
#include <tuple>

#include "attn_args.h"

namespace flash_mps {

// Which gradients are asked for.
struct WantedGradients {
  bool query, key, value, mask;
};

// Gradients of the problem's query, key, value (of its whole batch) and float mask, in their dtypes;
// undefined where not asked for.
struct AttnGradients {
  at::Tensor query, key, value, mask;
};

// `out` and `lse` are the results of the forward op on `problem`, in the caller's rank, and `grad_out`,
// `grad_lse` (undefined: zero) their gradients. Encodes; never commits or waits.
AttnGradients flash_bwd(const char* op, const AttnProblem& problem, const at::Tensor& out,
                        const at::Tensor& lse, const at::Tensor& grad_out,
                        const at::Tensor& grad_lse, WantedGradients wanted);

}  // namespace flash_mps
