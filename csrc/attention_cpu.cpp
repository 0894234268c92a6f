#include "attention_cpu.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <array>
#include <limits>

namespace flash_mps {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// [B, H, S, D] -> float32 [batch, H, S, D]
at::Tensor to_float(const at::Tensor& tensor, int64_t batch) {
  return tensor.to(at::kFloat).expand({batch, -1, -1, -1});
}

// Scores after scale, mask and visibility: float32 [B, Hq, Sq, Sk], -inf where a key is hidden.
at::Tensor scores(const AttnProblem& problem) {
  const int64_t heads_kv = problem.num_heads_kv, group = problem.group_size();
  const at::Tensor query = to_float(problem.query, problem.batch).unflatten(1, {heads_kv, group});
  const at::Tensor key = to_float(problem.key, problem.batch).unsqueeze(2);
  at::Tensor s = at::matmul(query, key.transpose(-1, -2)).flatten(1, 2).mul_(problem.softmax_scale);
  if (problem.mask_kind == kBoolMask) {
    s = s.masked_fill(problem.mask.logical_not(), -kInfinity);
  } else if (problem.mask_kind != kNoMask) {
    const at::Tensor bias = problem.mask.to(at::kFloat);
    s = s.add(bias).masked_fill(bias == -kInfinity, -kInfinity);
  }
  if (problem.is_causal) {
    const at::Tensor q_idx = at::arange(problem.seqlen_q).unsqueeze(1);
    s = s.masked_fill(at::arange(problem.seqlen_k) > q_idx + problem.causal_offset, -kInfinity);
  }
  return s;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> attention_cpu(const AttnProblem& problem, bool has_lse) {
  at::Tensor out = empty_out(problem);
  at::Tensor lse = has_lse ? empty_lse(problem) : at::Tensor();
  const int64_t rows = problem.batch * problem.num_heads_q * problem.seqlen_q;
  if (rows == 0 || problem.seqlen_k == 0) {
    out.zero_();
    if (has_lse) lse.fill_(-kInfinity);
  } else {
    const std::array<int64_t, 2> heads = {problem.num_heads_kv, problem.group_size()};
    const at::Tensor s = scores(problem);
    const at::Tensor m = s.amax(-1, /*keepdim=*/true);
    const at::Tensor shift = m.masked_fill(m == -kInfinity, 0.0);
    const at::Tensor p = at::exp(s - shift);
    const at::Tensor l = p.sum(-1, /*keepdim=*/true);
    // A key that no row sees must not meet its weight of 0 with a NaN.
    const at::Tensor unseen = (s == -kInfinity).unflatten(1, heads).flatten(2, 3).all(2);
    const at::Tensor value =
        to_float(problem.value, problem.batch).masked_fill(unseen.unsqueeze(-1), 0.0).unsqueeze(2);
    const at::Tensor sums = at::matmul(p.unflatten(1, heads), value).flatten(1, 2);
    out.copy_(sums / l.masked_fill(l == 0.0, 1.0));
    if (has_lse) lse.copy_((shift + at::log(l)).squeeze(-1));
  }
  return {restore_rank(problem, out), has_lse ? restore_rank(problem, lse) : lse};
}

}  // namespace flash_mps
