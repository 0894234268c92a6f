#include "flex_attention.h"

#include <ATen/Functions.h>

#include "backward_args.h"
#include "flash_bwd.h"
#include "flash_fwd.h"
#include "mask_args.h"
#include "user_code.h"

namespace flash_mps {

namespace {

// As many buffers has a kernel for captured tensors, and so many of their dimensions has setBytes room for.
constexpr size_t kMaxCaptured = 10;
constexpr size_t kMaxDimensions = 256;

AttnProblem check_flex(const char* op, FLASH_MPS_FLEX_PARAMETERS) {
  AttnProblem problem =
      check_inputs(op, query, key, value, {.enable_gqa = enable_gqa, .scale = scale});
  if (block_classes.has_value()) take_block_classes(op, *block_classes, problem);
  FLASH_MPS_CHECK(captured.size() <= kMaxCaptured,
                  c10::str("at most ", kMaxCaptured, " captured tensors"), captured.size());
  for (const at::Tensor& tensor : captured) {
    FLASH_MPS_CHECK(tensor.device() == query.device(),
                    c10::str("captured tensors on the device of query, ", query.device()),
                    tensor.device());
    FLASH_MPS_CHECK(tensor.numel() > 0, "captured tensors with elements", "shape ", tensor.sizes());
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
      problem.user.layout.push_back(tensor.size(dim));
      problem.user.layout.push_back(tensor.stride(dim));
    }
  }
  FLASH_MPS_CHECK(problem.user.layout.size() <= 2 * kMaxDimensions,
                  c10::str("captured tensors of at most ", kMaxDimensions, " dimensions in all"),
                  problem.user.layout.size() / 2);
  problem.user.number = user_code_number(std::string(code));
  problem.user.captured = captured.vec();
  return problem;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> flex_attention(FLASH_MPS_FLEX_PARAMETERS, bool for_backward) {
  constexpr const char* kOp = "flex_attention";
  AttnProblem problem =
      check_flex(kOp, query, key, value, captured, code, block_classes, scale, enable_gqa);
  problem.wants_gradient = for_backward;
  return flash_fwd(kOp, problem, /*has_lse=*/true);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> flex_attention_backward(
    const at::Tensor& grad_out, const OptionalTensor& grad_lse, const at::Tensor& out,
    const at::Tensor& lse, FLASH_MPS_FLEX_PARAMETERS, std::array<bool, 3> output_mask) {
  constexpr const char* kOp = "flex_attention_backward";
  const AttnProblem problem =
      check_flex(kOp, query, key, value, captured, code, block_classes, scale, enable_gqa);
  const AttnGradients gradients = checked_backward<flash_bwd>(
      kOp, problem, out, lse, grad_out, grad_lse.value_or(at::Tensor()),
      {.query = output_mask[0], .key = output_mask[1], .value = output_mask[2]});
  const auto result = [&](const at::Tensor& gradient, const at::Tensor& input) {
    return gradient.defined() ? restore_operand(problem, gradient, input) : no_gradient(query);
  };
  return {result(gradients.query, query), result(gradients.key, key),
          result(gradients.value, value)};
}

}  // namespace flash_mps
