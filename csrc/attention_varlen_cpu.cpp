#include "attention_varlen_cpu.h"

#include <ATen/Functions.h>

#include <limits>

#include "attention_cpu.h"

namespace flash_mps {

namespace {

struct Rows {
  int64_t begin, count;

  at::Tensor of(const at::Tensor& tensor) const { return tensor.narrow(2, begin, count); }
};

Rows rows_of(const at::Tensor& cu_seqlens, int64_t sequence) {
  const auto* numbers = cu_seqlens.const_data_ptr<int32_t>() + sequence;
  return {numbers[0], numbers[1] - numbers[0]};
}

// One of the sequences, as a problem of its own.
struct OneSequence {
  Rows queries, keys;
  AttnProblem problem;
};

OneSequence sequence_of(const AttnProblem& packed, int64_t index) {
  OneSequence one{rows_of(packed.packed->cu_seqlens_q, index),
                  rows_of(packed.packed->cu_seqlens_k, index), packed};
  AttnProblem& problem = one.problem;
  problem.packed.reset();
  problem.query = one.queries.of(packed.query);
  problem.key = one.keys.of(packed.key);
  problem.value = one.keys.of(packed.value);
  problem.seqlen_q = one.queries.count;
  problem.seqlen_k = one.keys.count;
  problem.causal_offset = packed.is_bottom_right ? one.keys.count - one.queries.count : 0;
  if (packed.alibi_slopes.defined() && packed.alibi_slopes.dim() == 2) {
    problem.alibi_slopes = packed.alibi_slopes[index];
  }
  problem.dropout_first_entry = index;
  return one;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> packed_attention_cpu(const char* /*op*/,
                                                        const AttnProblem& problem, bool has_lse) {
  const at::Tensor out = empty_out(problem).zero_();
  const at::Tensor lse =
      has_lse ? empty_lse(problem).fill_(-std::numeric_limits<float>::infinity()) : at::Tensor();
  for (int64_t i = 0; i < problem.packed->count; ++i) {
    const OneSequence one = sequence_of(problem, i);
    const auto [own_out, own_lse] = attention_cpu(one.problem, has_lse);
    one.queries.of(out).copy_(own_out);
    if (has_lse) one.queries.of(lse).copy_(own_lse);
  }
  return {out, lse};
}

AttnGradients packed_attention_backward_cpu(const char* op, const AttnProblem& problem,
                                            const at::Tensor& out, const at::Tensor& lse,
                                            const at::Tensor& grad_out, const at::Tensor& grad_lse,
                                            WantedGradients wanted) {
  const auto zeros = [&](bool is_wanted, const at::Tensor& operand) {
    return is_wanted ? empty_gradient(problem, operand).zero_() : at::Tensor();
  };
  AttnGradients sums{.query = zeros(wanted.query, problem.query),
                     .key = zeros(wanted.key, problem.key),
                     .value = zeros(wanted.value, problem.value)};
  if (wanted.sinks) sums.sinks = at::zeros_like(problem.sinks);
  for (int64_t i = 0; i < problem.packed->count; ++i) {
    const OneSequence one = sequence_of(problem, i);
    if (one.queries.count == 0) continue;
    const AttnGradients own = attention_backward_cpu(
        op, one.problem, one.queries.of(out), one.queries.of(lse), one.queries.of(grad_out),
        grad_lse.defined() ? one.queries.of(grad_lse) : at::Tensor(), wanted);
    if (wanted.query) one.queries.of(sums.query).copy_(own.query);
    if (wanted.key) one.keys.of(sums.key).copy_(own.key);
    if (wanted.value) one.keys.of(sums.value).copy_(own.value);
    if (wanted.sinks) sums.sinks += own.sinks;
  }
  return sums;
}

}  // namespace flash_mps
