#include "backward_args.h"

namespace flash_mps {

void check_rng_state(const char* op, double dropout_p, const OptionalTensor& rng_state) {
  FLASH_MPS_CHECK(dropout_p == 0.0 || rng_state.has_value(),
                  c10::str("the rng_state of the forward call with dropout_p of ", dropout_p),
                  "none");
}

void check_wanted(const char* op, const AttnProblem& problem, WantedGradients wanted) {
  const bool has_float_mask = problem.mask_kind != kNoMask && problem.mask_kind != kBoolMask;
  FLASH_MPS_CHECK(has_float_mask || !wanted.mask,
                  "a float attn_mask where its gradient is asked for",
                  problem.mask_kind == kBoolMask ? "a bool one" : "none");
  FLASH_MPS_CHECK(problem.sinks.defined() || !wanted.sinks,
                  "sinks where their gradient is asked for", "none");
}

}  // namespace flash_mps
