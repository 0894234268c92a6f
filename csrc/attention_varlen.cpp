// Inputs of the ops on packed sequences -> a problem of one batch entry that holds all of them, and its
// results in the shapes of the caller.

#include "attention_varlen.h"

#include <ATen/Functions.h>

#include "attention_varlen_cpu.h"
#include "backward_args.h"
#include "flash_bwd.h"
#include "flash_fwd.h"

namespace flash_mps {

namespace {

constexpr const char* kVarlen = "attention_varlen";
constexpr const char* kVarlenWithLse = "attention_varlen_with_lse";
constexpr const char* kVarlenBackward = "attention_varlen_backward";

// Sums of lengths and windows stay below 2^31 in the kernels.
constexpr int64_t kMaxTotal = int64_t{1} << 29;

// [total, H, D] -> [1, H, total, D], and back.
at::Tensor to_batch(const at::Tensor& tensor) {
  return tensor.transpose(0, 1).unsqueeze(0);
}

at::Tensor from_batch(const at::Tensor& tensor) {
  return tensor.squeeze(0).transpose(0, 1);
}

void check_rank(const char* op, const char* operand, const char* layout, const at::Tensor& tensor) {
  FLASH_MPS_CHECK(tensor.dim() == 3, c10::str(operand, " of rank 3 (", layout, ")"), "shape ",
                  tensor.sizes());
}

// Numbers that the CPU holds are judged here; those of a device are for the kernels to clamp.
void check_numbers(const char* op, const char* operand, const at::Tensor& cu_seqlens,
                   int64_t total) {
  const at::Tensor numbers = cu_seqlens.to(at::kLong).contiguous();
  const auto* number = numbers.const_data_ptr<int64_t>();
  int64_t before = 0;
  for (int64_t i = 0; i < numbers.size(0); ++i) {
    FLASH_MPS_CHECK(number[i] >= before && number[i] <= total,
                    c10::str(operand, " that begins at 0 or later, never falls and ends at ", total,
                             " at most"),
                    number[i], " at index ", i);
    before = number[i];
  }
}

// int32 and dense, on the device of query.
at::Tensor take_cu_seqlens(const char* op, const char* operand, const at::Tensor& cu_seqlens,
                           const at::Tensor& query, int64_t total) {
  const at::ScalarType type = cu_seqlens.scalar_type();
  FLASH_MPS_CHECK(type == at::kInt || type == at::kLong, c10::str(operand, " of dtype Int or Long"),
                  type);
  FLASH_MPS_CHECK(cu_seqlens.dim() == 1 && cu_seqlens.size(0) >= 1,
                  c10::str(operand, " of shape [number of sequences + 1]"), cu_seqlens.sizes());
  FLASH_MPS_CHECK(cu_seqlens.is_cpu() || cu_seqlens.device() == query.device(),
                  c10::str(operand, " on the CPU or the device of query, ", query.device()),
                  cu_seqlens.device());
  if (cu_seqlens.is_cpu()) check_numbers(op, operand, cu_seqlens, total);
  return cu_seqlens.to(query.device(), at::kInt).contiguous();
}

PackedSequences take_packed(const char* op, const at::Tensor& query, const at::Tensor& key,
                            const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                            int64_t max_seqlen_k) {
  const int64_t total_q = query.size(0), total_k = key.size(0);
  FLASH_MPS_CHECK(total_q + total_k < kMaxTotal, "total_q + total_k below 2^29", total_q, " + ",
                  total_k);
  PackedSequences packed{
      .cu_seqlens_q = take_cu_seqlens(op, "cu_seqlens_q", cu_seqlens_q, query, total_q),
      .cu_seqlens_k = take_cu_seqlens(op, "cu_seqlens_k", cu_seqlens_k, query, total_k),
      .count = cu_seqlens_q.size(0) - 1,
      .max_seqlen_k = max_seqlen_k,
  };
  FLASH_MPS_CHECK(cu_seqlens_k.size(0) == cu_seqlens_q.size(0),
                  c10::str("cu_seqlens_k of the size of cu_seqlens_q, ", cu_seqlens_q.size(0)),
                  cu_seqlens_k.size(0));
  return packed;
}

AttnProblem check_varlen(const char* op, FLASH_MPS_VARLEN_PARAMETERS(int64_t)) {
  check_rank(op, "query", "[total_q, num_heads_q, head_dim]", query);
  check_rank(op, "key", "[total_k, num_heads_kv, head_dim]", key);
  check_rank(op, "value", "[total_k, num_heads_kv, head_dim_v]", value);
  FLASH_MPS_CHECK(max_seqlen_q >= 0 && max_seqlen_k >= 0,
                  "max_seqlen_q and max_seqlen_k of 0 or more", max_seqlen_q, " and ",
                  max_seqlen_k);
  // A tensor without rows has no buffer to bind: one row that no sequence holds takes their place.
  const bool has_no_key = key.size(0) == 0 && value.size(0) == 0;
  const auto with_a_row = [&](const at::Tensor& tensor) {
    return has_no_key ? at::constant_pad_nd(tensor, {0, 0, 0, 0, 0, 1}) : tensor;
  };
  AttnProblem problem = check_inputs(
      op, to_batch(query), to_batch(with_a_row(key)), to_batch(with_a_row(value)),
      {.enable_gqa = true,
       FLASH_MPS_NUMBER_FIELDS,
       .alibi_slopes = alibi_slopes,
       .sinks = sinks,
       .rng_state = rng_state,
       .packed = take_packed(op, query, key, cu_seqlens_q, cu_seqlens_k, max_seqlen_k)});
  problem.is_bshd = true;
  // Slopes of no sequence have no buffer either.
  if (problem.packed->count == 0) problem.alibi_slopes.reset();
  return problem;
}

using ForwardKernel = TensorPair(const char* op, const AttnProblem& problem, bool has_lse);

template <ForwardKernel& KERNEL>
at::Tensor forward(FLASH_MPS_VARLEN_PARAMETERS(int64_t)) {
  const AttnProblem problem = check_varlen(kVarlen, FLASH_MPS_VARLEN_ARGUMENTS);
  return from_batch(std::get<0>(KERNEL(kVarlen, problem, false)));
}

template <ForwardKernel& KERNEL>
TensorPair forward_with_lse(FLASH_MPS_VARLEN_PARAMETERS(int64_t)) {
  const AttnProblem problem = check_varlen(kVarlenWithLse, FLASH_MPS_VARLEN_ARGUMENTS);
  const auto [out, lse] = KERNEL(kVarlenWithLse, problem, true);
  return {from_batch(out), lse.squeeze(0)};
}

template <BackwardKernel& KERNEL>
FourTensors backward(FLASH_MPS_VARLEN_BACKWARD_PARAMETERS(int64_t)) {
  // Backward may run under autocast, which must not reach the torch ops in here.
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  const char* op = kVarlenBackward;
  check_rng_state(op, dropout_p, rng_state);
  const AttnProblem problem = check_varlen(op, FLASH_MPS_VARLEN_ARGUMENTS);
  check_rank(op, "grad_out", "[total_q, num_heads_q, head_dim_v]", grad_out);
  check_rank(op, "out", "[total_q, num_heads_q, head_dim_v]", out);
  const auto [wants_query, wants_key, wants_value, wants_sinks] = output_mask;
  const AttnGradients gradients = checked_backward<KERNEL>(
      op, problem, to_batch(out), lse.unsqueeze(0), to_batch(grad_out),
      grad_lse.has_value() ? grad_lse->unsqueeze(0) : at::Tensor(),
      {.query = wants_query, .key = wants_key, .value = wants_value, .sinks = wants_sinks});
  const auto result = [&](const at::Tensor& gradient, const at::Tensor& input) {
    return gradient.defined() ? from_batch(gradient).narrow(0, 0, input.size(0))
                              : no_gradient(query);
  };
  return {result(gradients.query, query), result(gradients.key, key),
          result(gradients.value, value),
          wants_sinks ? gradients.sinks.to(sinks->scalar_type()) : no_gradient(query)};
}

}  // namespace

at::Tensor attention_varlen_mps(FLASH_MPS_VARLEN_PARAMETERS(int64_t)) {
  return forward<flash_fwd>(FLASH_MPS_VARLEN_ARGUMENTS);
}

TensorPair attention_varlen_with_lse_mps(FLASH_MPS_VARLEN_PARAMETERS(int64_t)) {
  return forward_with_lse<flash_fwd>(FLASH_MPS_VARLEN_ARGUMENTS);
}

FourTensors attention_varlen_backward_mps(FLASH_MPS_VARLEN_BACKWARD_PARAMETERS(int64_t)) {
  return backward<flash_bwd>(FLASH_MPS_VARLEN_BACKWARD_ARGUMENTS);
}

at::Tensor attention_varlen_cpu(FLASH_MPS_VARLEN_PARAMETERS(int64_t)) {
  return forward<packed_attention_cpu>(FLASH_MPS_VARLEN_ARGUMENTS);
}

TensorPair attention_varlen_with_lse_cpu(FLASH_MPS_VARLEN_PARAMETERS(int64_t)) {
  return forward_with_lse<packed_attention_cpu>(FLASH_MPS_VARLEN_ARGUMENTS);
}

FourTensors attention_varlen_backward_cpu(FLASH_MPS_VARLEN_BACKWARD_PARAMETERS(int64_t)) {
  return backward<packed_attention_backward_cpu>(FLASH_MPS_VARLEN_BACKWARD_ARGUMENTS);
}

}  // namespace flash_mps
