#include "flash_fwd.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <limits>
#include <vector>

#include "device.h"

namespace flash_mps {

namespace {

// macOS kills a dispatch that keeps the display waiting for seconds. 4e11 floating-point operations
// are 0.15 s at the 2.6 TFLOPS of the smallest GPU (M1, 8 cores).
double max_work_per_dispatch() {
  static const double limit = [] {
    const char* text = std::getenv("TORCH_FLASH_MPS_MAX_DISPATCH_FLOP");
    const double chosen = text != nullptr ? std::strtod(text, nullptr) : 0.0;
    return chosen > 0.0 ? chosen : 4e11;
  }();
  return limit;
}

double work(const AttnProblem& problem) {
  const auto pairs = static_cast<double>(visible_pairs(problem, 0, problem.seqlen_q));
  return 2.0 * pairs * static_cast<double>(problem.head_dim + problem.head_dim_v) *
         static_cast<double>(problem.batch * problem.num_heads_q);
}

Binding bind(const at::Tensor& tensor, uint32_t slot) {
  return {
      .buffer = tensor.storage().data(),
      .byte_offset = static_cast<uint64_t>(tensor.storage_offset() * tensor.element_size()),
      .slot = slot,
  };
}

void encode(const char* op, const AttnProblem& problem, const at::Tensor& out,
            const at::Tensor& lse) {
  Device* gpu = device();
  TORCH_CHECK(gpu != nullptr, "flash_mps::", op, ": expected a Metal device, got none");
  const GpuFamily family = tuned_family(gpu->gpu_family());
  const auto reason = flash_fwd_unsupported(problem, family);
  TORCH_CHECK(!reason.has_value(), "flash_mps::", op, ": ", *reason);
  const FlashFwdPlan plan = plan_flash_fwd(problem, family, lse.defined());
  const auto [pipeline, build_error] =
      gpu->pipeline(plan.key.cache_key(), [&] { return plan.key.source(); });
  TORCH_CHECK(pipeline != nullptr, "flash_mps::", op, ": ", build_error);

  std::array<Binding, 6> bindings;
  size_t num_bindings = 0;
  bindings[num_bindings++] = bind(problem.query, kQueryBuffer);
  bindings[num_bindings++] = bind(problem.key, kKeyBuffer);
  bindings[num_bindings++] = bind(problem.value, kValueBuffer);
  bindings[num_bindings++] = bind(out, kOutBuffer);
  if (lse.defined()) bindings[num_bindings++] = bind(lse, kLseBuffer);
  if (problem.mask.defined()) bindings[num_bindings++] = bind(problem.mask, kMaskBuffer);

  std::vector<AttnParams> params(plan.num_dispatches(), make_params(problem, out));
  std::vector<Launch> launches;
  launches.reserve(params.size());
  for (int64_t first = 0; first < plan.num_q_blocks; first += plan.q_blocks_per_dispatch) {
    AttnParams& own = params[launches.size()];
    own.first_q_block = static_cast<int32_t>(first);
    const int64_t count = std::min(plan.q_blocks_per_dispatch, plan.num_q_blocks - first);
    launches.push_back({
        .pipeline = pipeline,
        .bindings = {bindings.data(), num_bindings},
        .params = &own,
        .params_bytes = sizeof(AttnParams),
        .params_slot = kParamsBuffer,
        .grid = {static_cast<uint32_t>(count), static_cast<uint32_t>(problem.num_heads_q),
                 static_cast<uint32_t>(problem.batch)},
        .threads = static_cast<uint32_t>(plan.key.tiling->num_simdgroups() * 32),
    });
  }
  const std::string error = gpu->launch(launches);
  TORCH_CHECK(error.empty(), "flash_mps::", op, ": ", error);
}

}  // namespace

std::optional<std::string> flash_fwd_unsupported(const AttnProblem& problem, GpuFamily family) {
  const int64_t widest = std::max(problem.head_dim, problem.head_dim_v);
  const auto limit = std::numeric_limits<int>::max();
  if (widest > limit ||
      !choose_flash_fwd(family, element_bytes(problem.type), static_cast<int>(problem.head_dim),
                        static_cast<int>(problem.head_dim_v))) {
    return c10::str("expected head_dim and head_dim_v of at most ",
                    flash_fwd_tilings().back().max_head_dim, ", got ", problem.head_dim, " and ",
                    problem.head_dim_v);
  }
  return std::nullopt;
}

FlashFwdPlan plan_flash_fwd(const AttnProblem& problem, GpuFamily family, bool has_lse) {
  const Tiling* tiling =
      choose_flash_fwd(family, element_bytes(problem.type), static_cast<int>(problem.head_dim),
                       static_cast<int>(problem.head_dim_v));
  const int64_t num_q_blocks = (problem.seqlen_q + tiling->block_q - 1) / tiling->block_q;
  const double dispatches = std::max(1.0, work(problem) / max_work_per_dispatch());
  const auto per_dispatch = static_cast<int64_t>(static_cast<double>(num_q_blocks) / dispatches);
  return {
      .key = {.type = problem.type,
              .head_dim = instance_head_dim(problem.head_dim),
              .head_dim_v = instance_head_dim(problem.head_dim_v),
              .mask_kind = problem.mask_kind,
              .has_lse = has_lse,
              .tiling = tiling},
      .num_q_blocks = num_q_blocks,
      .q_blocks_per_dispatch = std::max<int64_t>(1, per_dispatch),
  };
}

std::tuple<at::Tensor, at::Tensor> flash_fwd(const char* op, const AttnProblem& problem,
                                             bool has_lse) {
  at::Tensor out = empty_out(problem);
  at::Tensor lse = has_lse ? empty_lse(problem) : at::Tensor();
  const bool has_work = out.numel() > 0 || (has_lse && lse.numel() > 0);
  if (has_work && problem.seqlen_k == 0) {
    out.zero_();
    if (has_lse) lse.fill_(-std::numeric_limits<float>::infinity());
  } else if (has_work && (problem.head_dim == 0 || problem.head_dim_v == 0)) {
    // A tensor without elements has no buffer to bind: one column of zeros gives the same scores.
    AttnProblem padded = problem;
    if (problem.head_dim == 0) {
      padded.query = at::constant_pad_nd(problem.query, {0, 1});
      padded.key = at::constant_pad_nd(problem.key, {0, 1});
      padded.head_dim = 1;
    }
    if (problem.head_dim_v == 0) {
      padded.value = at::constant_pad_nd(problem.value, {0, 1});
      padded.head_dim_v = 1;
    }
    const at::Tensor padded_out = problem.head_dim_v == 0 ? empty_out(padded) : out;
    encode(op, padded, padded_out, lse);
  } else if (has_work) {
    encode(op, problem, out, lse);
  }
  return {restore_rank(problem, out), has_lse ? restore_rank(problem, lse) : lse};
}

}  // namespace flash_mps
