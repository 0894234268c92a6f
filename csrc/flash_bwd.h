// The backward op on an MPS device.
#pragma once

#include "attn_args.h"

namespace flash_mps {

// Which gradients are asked for.
struct WantedGradients {
  bool query = false, key = false, value = false, mask = false, sinks = false;
};

// Gradients of the problem's query, key, value (of its whole batch) and float mask, in their dtypes, and
// of its sinks, in float32; undefined where not asked for.
struct AttnGradients {
  at::Tensor query, key, value, mask, sinks;
};

// The gradient of sinks: a sink is a key of weight exp(sink - lse) without a value. lse, delta:
// [B, Hq, Sq].
at::Tensor sinks_gradient(const AttnProblem& problem, const at::Tensor& lse,
                          const at::Tensor& delta);

// `out` and `lse` are the results of the forward op on `problem`, in the caller's rank, and `grad_out`,
// `grad_lse` (undefined: zero) their gradients. Encodes; never commits or waits.
AttnGradients flash_bwd(const char* op, const AttnProblem& problem, const at::Tensor& out,
                        const at::Tensor& lse, const at::Tensor& grad_out,
                        const at::Tensor& grad_lse, WantedGradients wanted);

}  // namespace flash_mps
