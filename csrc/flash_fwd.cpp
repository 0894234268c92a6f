#include "flash_fwd.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "flash_decode.h"
#include "flash_launch.h"
#include "score_args.h"
#include "visibility.h"

namespace flash_mps {

namespace {

double work(const AttnProblem& problem, int head_blocks) {
  const auto pairs = static_cast<double>(visible_pairs(problem, 0, problem.seqlen_q));
  return 2.0 * pairs * static_cast<double>(problem.head_dim * head_blocks + problem.head_dim_v) *
         static_cast<double>(problem.batch * problem.num_heads_q);
}

void launch(const char* op, const AttnProblem& problem, const at::Tensor& out,
            const at::Tensor& lse) {
  if (runs_decode(problem)) {
    flash_decode(op, problem, /*cached=*/nullptr, out, lse);
    return;
  }
  const GpuFamily family = tuned_family(require_device(op).gpu_family());
  const auto reason = flash_fwd_unsupported(problem, family);
  TORCH_CHECK(!reason.has_value(), "flash_mps::", op, ": ", *reason);
  const FlashFwdPlan plan = plan_flash_fwd(problem, family, lse.defined());
  const Pipeline* pipeline = require_pipeline(op, plan.key);

  std::vector<Binding> bindings;
  bindings.reserve(10);
  bindings.push_back(bind(problem.query, kQueryBuffer));
  bindings.push_back(bind(problem.key, kKeyBuffer));
  bindings.push_back(bind(problem.value, kValueBuffer));
  bindings.push_back(bind(out, kOutBuffer));
  if (lse.defined()) bindings.push_back(bind(lse, kLseBuffer));
  bind_score_buffers(bindings, problem);
  if (problem.sinks.defined()) bindings.push_back(bind(problem.sinks, kSinksBuffer));

  std::vector<AttnParams> params(plan.num_dispatches(), make_params(problem, out));
  std::vector<Launch> launches;
  launches.reserve(params.size());
  for (int64_t first = 0; first < plan.num_q_blocks; first += plan.q_blocks_per_dispatch) {
    AttnParams& own = params[launches.size()];
    own.first_q_block = static_cast<int32_t>(first);
    const int64_t count = std::min(plan.q_blocks_per_dispatch, plan.num_q_blocks - first);
    launches.push_back({
        .pipeline = pipeline,
        .bindings = bindings,
        .params = &own,
        .params_bytes = sizeof(AttnParams),
        .params_slot = kParamsBuffer,
        .grid = {static_cast<uint32_t>(count * plan.head_blocks),
                 static_cast<uint32_t>(problem.num_heads_q), static_cast<uint32_t>(problem.batch)},
        .threads = static_cast<uint32_t>(plan.key.tiling->num_simdgroups) * kSimdWidth,
    });
    add_user_layout(launches.back(), problem);
  }
  encode(op, launches);
}

}  // namespace

std::optional<std::string> flash_fwd_unsupported(const AttnProblem& problem, GpuFamily family) {
  const int64_t widest = std::max(problem.head_dim, problem.head_dim_v);
  const auto limit = std::numeric_limits<int>::max();
  if (widest > limit ||
      !choose(Op::FlashFwd, family, element_bytes(problem.type), static_cast<int>(problem.head_dim),
              static_cast<int>(problem.head_dim_v))) {
    return c10::str("expected head_dim and head_dim_v of at most ", max_head_dim(Op::FlashFwd),
                    ", got ", problem.head_dim, " and ", problem.head_dim_v);
  }
  return std::nullopt;
}

FlashFwdPlan plan_flash_fwd(const AttnProblem& problem, GpuFamily family, bool has_lse) {
  const Tiling* tiling =
      choose(Op::FlashFwd, family, element_bytes(problem.type), static_cast<int>(problem.head_dim),
             static_cast<int>(problem.head_dim_v));
  const int64_t num_q_blocks = num_query_blocks(problem, tiling->block_q);
  const int head_dim = instance_head_dim(problem.head_dim);
  const int head_dim_v = instance_head_dim(problem.head_dim_v);
  const int num_head_blocks = head_blocks(Op::FlashFwd, head_dim, head_dim_v).count;
  return {
      .key = {.op = Op::FlashFwd,
              .type = problem.type,
              .head_dim = head_dim,
              .head_dim_v = head_dim_v,
              .mask_kind = problem.mask_kind,
              .constants = constant_bit(kHasLseConstant, has_lse) |
                           constant_bit(kHasSinksConstant, problem.sinks.defined()) |
                           score_constants(problem),
              .user_code = problem.user.number,
              .tiling = tiling},
      .num_q_blocks = num_q_blocks,
      .q_blocks_per_dispatch = blocks_per_dispatch(num_q_blocks, work(problem, num_head_blocks)),
      .head_blocks = num_head_blocks,
  };
}

std::tuple<at::Tensor, at::Tensor> flash_fwd(const char* op, const AttnProblem& problem,
                                             bool has_lse) {
  at::Tensor out = empty_out(problem);
  at::Tensor lse = has_lse ? empty_lse(problem) : at::Tensor();
  const bool has_work = out.numel() > 0 || (has_lse && lse.numel() > 0);
  if (has_work && problem.seqlen_k == 0) {
    out.zero_();
    if (has_lse) fill_empty_lse(problem, lse);
  } else if (has_work && (problem.head_dim == 0 || problem.head_dim_v == 0)) {
    const AttnProblem padded = without_empty_head_dims(problem);
    launch(op, padded, problem.head_dim_v == 0 ? empty_out(padded) : out, lse);
  } else if (has_work) {
    launch(op, problem, out, lse);
  }
  return {restore_rank(problem, out), has_lse ? restore_rank(problem, lse) : lse};
}

}  // namespace flash_mps
