// Attention with a user-defined score and mask on an MPS device, and its gradients.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/List.h>

#include <array>
#include <optional>
#include <string_view>
#include <tuple>

#include "attn_args.h"

namespace flash_mps {

// In the order of the schemas. `code` is the text that takes the place of metal/user_score.h, `captured`
// the tensors that it reads.
#define FLASH_MPS_FLEX_PARAMETERS                                                          \
  const at::Tensor &query, const at::Tensor &key, const at::Tensor &value,                 \
      at::TensorList captured, std::string_view code, const OptionalTensor &block_classes, \
      std::optional<double> scale, bool enable_gqa

// Out and lse. `for_backward`: lse is for flex_attention_backward().
std::tuple<at::Tensor, at::Tensor> flex_attention(FLASH_MPS_FLEX_PARAMETERS, bool for_backward);

// The gradients of query, key and value; empty where not asked for.
std::tuple<at::Tensor, at::Tensor, at::Tensor> flex_attention_backward(
    const at::Tensor& grad_out, const OptionalTensor& grad_lse, const at::Tensor& out,
    const at::Tensor& lse, FLASH_MPS_FLEX_PARAMETERS, std::array<bool, 3> output_mask);

}  // namespace flash_mps
