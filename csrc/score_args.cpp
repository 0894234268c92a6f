#include "score_args.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace flash_mps {

void check_options(const char* op, const AttnOptions& options) {
  FLASH_MPS_CHECK(options.dropout_p >= 0.0 && options.dropout_p <= 1.0, "dropout_p between 0 and 1",
                  options.dropout_p);
  const auto softcap = static_cast<float>(options.softcap);  // as kernels have it
  FLASH_MPS_CHECK(options.softcap == 0.0 || (softcap > 0.0f && std::isnormal(softcap)),
                  "softcap of 0 (off) or a positive number", options.softcap);
  FLASH_MPS_CHECK(options.window_left >= -1, "window_left of -1 (unlimited) or more",
                  options.window_left);
  FLASH_MPS_CHECK(options.window_right >= -1, "window_right of -1 (unlimited) or more",
                  options.window_right);
}

void take_score_options(const char* op, const AttnOptions& options, AttnProblem& problem) {
  problem.softcap = options.softcap;
  const auto take = [&](const char* operand, const OptionalTensor& tensor, bool may_have_batch) {
    if (!tensor.has_value()) return at::Tensor();
    const bool is_whole = !problem.has_own_rank || problem.leading_shape.size() > 2;
    FLASH_MPS_CHECK(is_whole, c10::str(operand, " with query of rank 4 or more"), "query of shape ",
                    at::IntArrayRef(problem.leading_shape), " before seqlen_q and head_dim");
    const auto type = tensor->scalar_type();
    FLASH_MPS_CHECK(type == at::kFloat || type == problem.query.scalar_type(),
                    c10::str(operand, " of dtype Float or query's, ", problem.query.scalar_type()),
                    type);
    FLASH_MPS_CHECK(tensor->device() == problem.query.device(),
                    c10::str(operand, " on the device of query, ", problem.query.device()),
                    tensor->device());
    const int64_t heads[] = {problem.num_heads_q};
    const int64_t all[] = {problem.num_sequences(), problem.num_heads_q};
    const bool fits = tensor->sizes() == at::IntArrayRef(heads) ||
                      (may_have_batch && tensor->sizes() == at::IntArrayRef(all));
    FLASH_MPS_CHECK(fits,
                    c10::str(operand, " of shape [", problem.num_heads_q, "]",
                             may_have_batch ? c10::str(" or ", at::IntArrayRef(all)) : ""),
                    tensor->sizes());
    return tensor->to(at::kFloat).contiguous();
  };
  problem.alibi_slopes = take("alibi_slopes", options.alibi_slopes, !problem.has_own_rank);
  problem.sinks = take("sinks", options.sinks, false);
}

void take_dropout(const char* op, const AttnOptions& options, AttnProblem& problem) {
  problem.dropout_p = options.dropout_p;
  if (options.dropout_p == 0.0) return;
  const at::Tensor state = options.rng_state.has_value() ? *options.rng_state : draw_rng_state();
  FLASH_MPS_CHECK(
      state.is_cpu() && state.scalar_type() == at::kInt && state.dim() == 1 && state.size(0) == 2,
      "rng_state of dtype Int and shape [2] on the CPU", state.scalar_type(), " ", state.sizes(),
      " on ", state.device());
  const at::Tensor dense = state.contiguous();
  std::copy_n(dense.const_data_ptr<int32_t>(), 2, problem.dropout_key);
}

at::Tensor draw_rng_state() {
  // Checkpointing under torch.compile replays only random ops that name their device.
  return at::randint(std::numeric_limits<int32_t>::max(), {2},
                     at::dtype(at::kInt).device(at::kCPU));
}

uint32_t dropout_threshold(const AttnProblem& problem) {
  const double words = problem.dropout_p * 4294967296.0;
  return static_cast<uint32_t>(std::min(std::round(words), 4294967295.0));
}

float dropout_scale(const AttnProblem& problem) {
  return problem.dropout_p < 1.0 ? static_cast<float>(1.0 / (1.0 - problem.dropout_p)) : 0.0f;
}

void fill_empty_lse(const AttnProblem& problem, const at::Tensor& lse) {
  if (problem.sinks.defined()) {
    lse.copy_(problem.sinks.unsqueeze(1));
  } else {
    lse.fill_(-std::numeric_limits<float>::infinity());
  }
}

}  // namespace flash_mps
