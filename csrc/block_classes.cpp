#include "block_classes.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <vector>

#include "flash_decode.h"
#include "flash_launch.h"
#include "mask_args.h"
#include "visibility.h"

namespace flash_mps {

namespace {

constexpr const char* kOp = "mask_block_classes";
constexpr uint32_t kSimdgroups = 4;
// Matrix products of the backward for two of the forward.
constexpr double kBackwardShare = 7.0 / 2.0;

void check_mask(const at::Tensor& mask) {
  const char* op = kOp;
  FLASH_MPS_CHECK(mask.dim() >= 2, "attn_mask of rank 2 or more", "shape ", mask.sizes());
  const at::ScalarType type = mask.scalar_type();
  FLASH_MPS_CHECK(
      type == at::kBool || type == at::kFloat || type == at::kHalf || type == at::kBFloat16,
      "attn_mask of dtype Bool, Float, Half or BFloat16", type);
}

std::vector<int64_t> class_sizes(const at::Tensor& mask) {
  std::vector<int64_t> sizes = mask.sizes().vec();
  for (auto size = sizes.end() - 2; size != sizes.end(); ++size) *size = num_class_blocks(*size);
  return sizes;
}

// Bytes of all elements, each once.
double bytes_of(const at::Tensor& mask) {
  auto bytes = static_cast<double>(mask.element_size());
  for (int64_t dim = 0; dim < mask.dim(); ++dim) {
    if (mask.stride(dim) != 0) bytes *= static_cast<double>(mask.size(dim));
  }
  return bytes;
}

// `mask` and `classes` are 4-D.
void launch(const at::Tensor& mask, const at::Tensor& classes) {
  const bool is_bool = mask.scalar_type() == at::kBool;
  const KernelKey key = {
      .op = Op::MaskBlockClasses,
      .type = is_bool ? ElementType::Float32 : element_type(kOp, mask.scalar_type()),
      .mask_kind = is_bool ? kBoolMask : kSameMask,
  };
  const std::vector<Binding> bindings = {bind(mask, kMaskBuffer),
                                         bind(classes, kBlockClassesBuffer)};
  const MaskClassParams params = {
      .mask_stride_b = mask.stride(0),
      .mask_stride_h = mask.stride(1),
      .mask_stride_q = mask.stride(2),
      .mask_stride_k = mask.stride(3),
      .num_heads_q = static_cast<int32_t>(mask.size(1)),
      .seqlen_q = static_cast<int32_t>(mask.size(2)),
      .seqlen_k = static_cast<int32_t>(mask.size(3)),
      .num_q_blocks = static_cast<int32_t>(classes.size(2)),
      .num_k_blocks = static_cast<int32_t>(classes.size(3)),
  };
  const Launch one = {
      .pipeline = require_pipeline(kOp, key),
      .bindings = bindings,
      .params = &params,
      .params_bytes = sizeof(params),
      .params_slot = kParamsBuffer,
      .grid = {static_cast<uint32_t>(ceil_div(classes.size(3), kSimdgroups)),
               static_cast<uint32_t>(classes.size(2)),
               static_cast<uint32_t>(classes.size(0) * classes.size(1))},
      .threads = kSimdgroups * kSimdWidth,
  };
  encode(kOp, {&one, 1});
}

}  // namespace

at::Tensor mask_block_classes_mps(const at::Tensor& attn_mask) {
  check_mask(attn_mask);
  const at::Tensor classes =
      at::empty(class_sizes(attn_mask), attn_mask.options().dtype(at::kByte));
  if (classes.numel() == 0) return classes;
  const auto to_4d = [](at::Tensor tensor) {
    while (tensor.dim() < 4) tensor = tensor.unsqueeze(0);
    return tensor.flatten(0, tensor.dim() - 4);
  };
  launch(to_4d(attn_mask), to_4d(classes));
  return classes;
}

at::Tensor mask_block_classes_cpu(const at::Tensor& attn_mask) {
  check_mask(attn_mask);
  const bool is_bool = attn_mask.scalar_type() == at::kBool;
  const at::Tensor is_hidden = is_bool ? attn_mask.logical_not() : attn_mask.isneginf();
  const at::Tensor is_open = is_bool ? attn_mask : attn_mask == 0;
  const auto of_all = [&](const at::Tensor& pairs) {
    const int64_t q = pairs.size(-2), k = pairs.size(-1);
    const std::vector<int64_t> sizes = class_sizes(pairs);
    const int64_t num_q = sizes.end()[-2], num_k = sizes.end()[-1];
    const int64_t block = FLASH_MPS_CLASS_BLOCK;
    const at::Tensor padded =
        at::constant_pad_nd(pairs, {0, num_k * block - k, 0, num_q * block - q}, true);
    return padded.unflatten(-1, {num_k, block}).unflatten(-3, {num_q, block}).all(-1).all(-2);
  };
  const at::Tensor classes = at::full({}, static_cast<int>(kMixedBlock), at::kByte)
                                 .expand(class_sizes(attn_mask))
                                 .masked_fill(of_all(is_open), static_cast<int>(kOpenBlock));
  return classes.masked_fill(of_all(is_hidden), static_cast<int>(kHiddenBlock));
}

at::Tensor without_repeats(const at::Tensor& mask) {
  at::Tensor result = mask;
  for (int64_t dim = 0; dim < mask.dim(); ++dim) {
    if (mask.size(dim) > 1 && mask.stride(dim) == 0) result = result.narrow(dim, 0, 1);
  }
  return result;
}

bool classifies_mask(const at::Tensor& mask, double pairs, int64_t head_dims) {
  const double forward = 2.0 * pairs * static_cast<double>(head_dims);
  return mask_pass_pays(
      {.mask_bytes = bytes_of(mask), .products = forward * (1.0 + kBackwardShare)});
}

bool classifies_mask(const AttnProblem& problem, bool is_decode) {
  if (!problem.mask.defined() || problem.block_classes.defined()) return false;
  const auto pairs = static_cast<double>(visible_pairs(problem, 0, problem.seqlen_q)) *
                     static_cast<double>(problem.batch * problem.num_heads_q);
  const int64_t head_dims = problem.head_dim + problem.head_dim_v;
  if (problem.wants_gradient) return classifies_mask(problem.mask, pairs, head_dims);
  return mask_pass_pays({
      .mask_bytes = bytes_of(problem.mask),
      .key_bytes = is_decode ? unconditional_key_bytes(problem) : 0.0,
      .products = 2.0 * pairs * static_cast<double>(head_dims),
  });
}

AttnProblem with_block_classes(AttnProblem problem, bool is_decode) {
  if (classifies_mask(problem, is_decode)) {
    problem.block_classes = mask_block_classes_mps(without_repeats(problem.mask));
  }
  return problem;
}

}  // namespace flash_mps
