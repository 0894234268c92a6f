#include "attention_cpu.h"

#include <ATen/ExpandUtils.h>
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <array>
#include <limits>

#include "../metal/philox.h"
#include "score_args.h"
#include "visibility.h"

namespace flash_mps {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// [B, H, S, D] -> float32 [batch, H, S, D]
at::Tensor to_float(const at::Tensor& tensor, int64_t batch) {
  return tensor.to(at::kFloat).expand({batch, -1, -1, -1});
}

// How far key j is ahead of query i: int64 [Sq, Sk].
at::Tensor distances(const AttnProblem& problem) {
  return at::arange(problem.seqlen_k) - at::arange(problem.seqlen_q).unsqueeze(1);
}

// Q Kᵀ · scale: float32 [B, Hq, Sq, Sk].
at::Tensor products(const AttnProblem& problem) {
  const int64_t heads_kv = problem.num_heads_kv, group = problem.group_size();
  const at::Tensor query = to_float(problem.query, problem.batch).unflatten(1, {heads_kv, group});
  const at::Tensor key = to_float(problem.key, problem.batch).unsqueeze(2);
  return at::matmul(query, key.transpose(-1, -2)).flatten(1, 2).mul_(problem.softmax_scale);
}

// Scores after every modifier and visibility: float32 [B, Hq, Sq, Sk], -inf where a key is hidden.
at::Tensor scores(const AttnProblem& problem) {
  at::Tensor s = products(problem);
  if (problem.softcap != 0.0) s = at::tanh(s / problem.softcap).mul_(problem.softcap);
  const at::Tensor distance = distances(problem);
  if (problem.alibi_slopes.defined()) {
    s = s.sub(problem.alibi_slopes.unsqueeze(-1).unsqueeze(-1) *
              (distance - problem.causal_offset).abs().to(at::kFloat));
  }
  if (problem.mask_kind == kBoolMask) {
    s = s.masked_fill(problem.mask.logical_not(), -kInfinity);
  } else if (problem.mask_kind != kNoMask) {
    const at::Tensor bias = problem.mask.to(at::kFloat);
    s = s.add(bias).masked_fill(bias == -kInfinity, -kInfinity);
  }
  const auto [begin, end] = key_band(problem);
  return s.masked_fill((distance < begin).logical_or_(distance >= end), -kInfinity);
}

// What dropout multiplies each pair by, 0 or 1 / (1 - dropout_p): float32 [B, Hq, Sq, Sk].
at::Tensor dropout_factors(const AttnProblem& problem) {
  const int64_t heads = problem.batch * problem.num_heads_q;
  const at::Tensor factors = at::empty(
      {problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_k}, at::kFloat);
  const PhiloxKey key = {problem.dropout_key[0], problem.dropout_key[1]};
  const uint32_t threshold = dropout_threshold(problem);
  const float scale = dropout_scale(problem);
  auto* factor = factors.mutable_data_ptr<float>();
  for (int64_t row = 0; row < heads * problem.seqlen_q; ++row) {
    const auto head_idx = static_cast<uint32_t>(problem.dropout_first_entry * problem.num_heads_q +
                                                row / problem.seqlen_q);
    const auto q_idx = static_cast<uint32_t>(row % problem.seqlen_q);
    PhiloxWords random{};
    for (int64_t k = 0; k < problem.seqlen_k; ++k) {
      if (k % 4 == 0) random = dropout_words(key, head_idx, q_idx, static_cast<uint32_t>(k));
      *factor++ = random.words[k % 4] >= threshold ? scale : 0.0f;
    }
  }
  return factors;
}

// float32 [Hq, 1, 1]
at::Tensor sink_column(const AttnProblem& problem) {
  return problem.sinks.unsqueeze(-1).unsqueeze(-1);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> attention_cpu(const AttnProblem& problem, bool has_lse) {
  at::Tensor out = empty_out(problem);
  at::Tensor lse = has_lse ? empty_lse(problem) : at::Tensor();
  const int64_t rows = problem.total_rows();
  if (rows == 0 || problem.seqlen_k == 0) {
    out.zero_();
    if (has_lse) fill_empty_lse(problem, lse);
  } else {
    const std::array<int64_t, 2> heads = {problem.num_heads_kv, problem.group_size()};
    const at::Tensor s = scores(problem);
    at::Tensor m = s.amax(-1, /*keepdim=*/true);
    if (problem.sinks.defined()) m = at::maximum(m, sink_column(problem));
    const at::Tensor shift = m.masked_fill(m == -kInfinity, 0.0);
    const at::Tensor p = at::exp(s - shift);
    at::Tensor l = p.sum(-1, /*keepdim=*/true);
    if (problem.sinks.defined()) l = l + at::exp(sink_column(problem) - shift);
    // A key that no row sees must not meet its weight of 0 with a NaN.
    const at::Tensor unseen = (s == -kInfinity).unflatten(1, heads).flatten(2, 3).all(2);
    const at::Tensor value =
        to_float(problem.value, problem.batch).masked_fill(unseen.unsqueeze(-1), 0.0).unsqueeze(2);
    const at::Tensor kept = problem.dropout_p != 0.0 ? p * dropout_factors(problem) : p;
    const at::Tensor sums = at::matmul(kept.unflatten(1, heads), value).flatten(1, 2);
    out.copy_(sums / l.masked_fill(l == 0.0, 1.0));
    if (has_lse) lse.copy_((shift + at::log(l)).squeeze(-1));
  }
  return {restore_rank(problem, out), has_lse ? restore_rank(problem, lse) : lse};
}

AttnGradients attention_backward_cpu(const char* /*op*/, const AttnProblem& problem,
                                     const at::Tensor& /*out*/, const at::Tensor& lse,
                                     const at::Tensor& grad_out, const at::Tensor& grad_lse,
                                     WantedGradients wanted) {
  const int64_t batch = problem.batch, group = problem.group_size(), seqlen_q = problem.seqlen_q;
  // [B, Hq, Sq, x] -> [B, Hkv, G·Sq, x]: the rows that read one KV head, below each other.
  const auto gather = [&](const at::Tensor& tensor) {
    return tensor.unflatten(1, {problem.num_heads_kv, group}).flatten(2, 3);
  };
  const auto gathered_rows = [&](const at::Tensor& tensor, int64_t width) {
    const int64_t sizes[] = {batch, problem.num_heads_q, seqlen_q, width};
    return gather(tensor.to(at::kFloat).reshape(sizes));
  };
  const at::Tensor row_lse = gathered_rows(lse, 1);
  // What a pair without weight holds, NaN or not, must not meet its weight of 0.
  const at::Tensor no_key = row_lse == -kInfinity;
  const at::Tensor s = gather(scores(problem));
  const at::Tensor hidden = s == -kInfinity;
  const at::Tensor unseen = hidden.all(2).unsqueeze(-1);
  const at::Tensor p = at::exp(s - row_lse.masked_fill(no_key, 0.0));
  const at::Tensor grad_rows = gathered_rows(grad_out, problem.head_dim_v).masked_fill(no_key, 0.0);
  AttnGradients gradients;
  const auto store = [&](const at::Tensor& operand, const at::Tensor& gradient) {
    return empty_gradient(problem, operand).copy_(at::sum_to(gradient, operand.sizes()));
  };
  const at::Tensor factors =
      problem.dropout_p != 0.0 ? gather(dropout_factors(problem)) : at::ones({}, at::kFloat);
  if (wanted.value) {
    gradients.value = store(problem.value, at::matmul((p * factors).transpose(-1, -2), grad_rows));
  }
  const at::Tensor value = to_float(problem.value, batch);
  const at::Tensor grad_p =
      (at::matmul(grad_rows, value.transpose(-1, -2)) * factors).masked_fill(hidden, 0.0);
  // Equal to rowsum(grad_out * out), but for the rounding of out.
  at::Tensor delta = (p * grad_p).sum(-1, /*keepdim=*/true);
  if (grad_lse.defined()) delta = delta - gathered_rows(grad_lse, 1);
  const at::Tensor grad_s = (p * (grad_p - delta)).masked_fill(hidden, 0.0);
  const auto scatter = [&](const at::Tensor& tensor) {
    return tensor.unflatten(2, {group, seqlen_q}).flatten(1, 2);
  };
  if (wanted.sinks) {
    gradients.sinks =
        sinks_gradient(problem, scatter(row_lse).squeeze(-1), scatter(delta).squeeze(-1));
  }
  at::Tensor grad_product = grad_s;
  if (problem.softcap != 0.0) {
    const at::Tensor t = at::tanh(gather(products(problem)) / problem.softcap);
    grad_product = (grad_s * (1.0 - t * t)).masked_fill(hidden, 0.0);
  }
  if (wanted.query) {
    const at::Tensor key = to_float(problem.key, batch).masked_fill(unseen, 0.0);
    gradients.query =
        store(problem.query, scatter(at::matmul(grad_product, key)) * problem.softmax_scale);
  }
  if (wanted.key) {
    const at::Tensor query = gather(to_float(problem.query, batch)).masked_fill(no_key, 0.0);
    gradients.key = store(
        problem.key, at::matmul(grad_product.transpose(-1, -2), query) * problem.softmax_scale);
  }
  if (wanted.mask) {
    gradients.mask = at::empty(problem.mask.sizes(), problem.mask.options());
    gradients.mask.copy_(at::sum_to(scatter(grad_s), problem.mask.sizes()));
  }
  return gradients;
}

}  // namespace flash_mps
