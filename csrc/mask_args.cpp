#include "mask_args.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/TensorBody.h>

#include <array>

namespace flash_mps {

namespace {

// A tensor that goes with [B, Hq] and two more dimensions as masks do, in 4 dimensions. Throws unless it
// is broadcastable to them.
at::Tensor broadcastable_to(const char* op, const char* operand, const at::Tensor& tensor,
                            const AttnProblem& problem, std::array<int64_t, 2> last) {
  const int64_t wanted[] = {problem.batch, problem.num_heads_q, last[0], last[1]};
  const int64_t rank =
      problem.has_own_rank ? static_cast<int64_t>(problem.leading_shape.size()) + 2 : 4;
  const auto check = [&](bool fits) {
    FLASH_MPS_CHECK(fits,
                    c10::str(operand, " of rank 2 or more, broadcastable to [", wanted[0], ", ",
                             wanted[1], ", ", wanted[2], ", ", wanted[3], "]"),
                    "shape ", tensor.sizes());
  };
  FLASH_MPS_CHECK(tensor.device() == problem.query.device(),
                  c10::str(operand, " on the device of query, ", problem.query.device()),
                  tensor.device());
  check(tensor.dim() >= 2 && tensor.dim() <= rank);
  at::Tensor result = tensor;
  if (problem.has_own_rank && rank > 4) {
    std::vector<int64_t> sizes = problem.leading_shape;
    sizes.back() = tensor.dim() > 2 ? tensor.size(-3) : 1;
    sizes.insert(sizes.end(), {tensor.size(-2), tensor.size(-1)});
    check(at::is_expandable_to(tensor.sizes(), sizes));
    result = tensor.expand(sizes).flatten(0, rank - 4);
  } else if (rank == 3 && tensor.dim() == 3) {
    result = tensor.unsqueeze(1);
  }
  while (result.dim() < 4) result = result.unsqueeze(0);
  for (int i = 0; i < 4; ++i) check(result.size(i) == 1 || result.size(i) == wanted[i]);
  return result;
}

}  // namespace

MaskKind mask_kind(const char* op, at::ScalarType mask_type, at::ScalarType query_type) {
  if (mask_type == at::kBool) return kBoolMask;
  if (mask_type == query_type) return kSameMask;
  FLASH_MPS_CHECK(mask_type == at::kFloat,
                  c10::str("attn_mask of dtype Bool, Float or query's, ", query_type), mask_type);
  return kFloatMask;
}

void take_mask(const char* op, const AttnOptions& options, AttnProblem& problem) {
  problem.mask_kind = kNoMask;
  if (options.attn_mask.has_value()) {
    const at::Tensor& mask = *options.attn_mask;
    problem.mask_kind = mask_kind(op, mask.scalar_type(), problem.query.scalar_type());
    problem.mask =
        broadcastable_to(op, "attn_mask", mask, problem, {problem.seqlen_q, problem.seqlen_k});
  }
  if (options.block_classes.has_value()) {
    FLASH_MPS_CHECK(options.attn_mask.has_value(), "attn_mask with block_classes", "none");
    take_block_classes(op, *options.block_classes, problem);
  }
}

void take_block_classes(const char* op, const at::Tensor& classes, AttnProblem& problem) {
  FLASH_MPS_CHECK(classes.scalar_type() == at::kByte, "block_classes of dtype Byte",
                  classes.scalar_type());
  problem.block_classes =
      broadcastable_to(op, "block_classes", classes, problem,
                       {num_class_blocks(problem.seqlen_q), num_class_blocks(problem.seqlen_k)});
}

}  // namespace flash_mps
