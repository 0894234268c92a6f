// The forward op on an MPS device.
#pragma once

#include <optional>
#include <string>
#include <tuple>

#include "attn_args.h"

namespace flash_mps {

// How a problem would run.
struct FlashFwdPlan {
  KernelKey key;
  int64_t num_q_blocks;
  int64_t q_blocks_per_dispatch;
  int head_blocks;  // threadgroups that share the columns of out

  int64_t num_dispatches() const {
    return (num_q_blocks + q_blocks_per_dispatch - 1) / q_blocks_per_dispatch;
  }
};

// Why the kernel cannot run this problem on a GPU of this family; nothing when it can.
std::optional<std::string> flash_fwd_unsupported(const AttnProblem& problem, GpuFamily family);

FlashFwdPlan plan_flash_fwd(const AttnProblem& problem, GpuFamily family, bool has_lse);

// out [.., Sq, Dv] and lse [.., Sq] (undefined unless asked for). Encodes; never commits or waits.
std::tuple<at::Tensor, at::Tensor> flash_fwd(const char* op, const AttnProblem& problem,
                                             bool has_lse);

}  // namespace flash_mps
