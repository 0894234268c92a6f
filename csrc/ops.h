// The parameters that the ops share, and what runs above the devices: autograd and autocast.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>

#include "attn_args.h"

namespace flash_mps {

using TensorPair = std::tuple<at::Tensor, at::Tensor>;
using FiveTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// In the order of the schemas. AttnOptions has a field of the same name for each option.
#define FLASH_MPS_OPTION_PARAMETERS                                                               \
  const OptionalTensor &attn_mask, double dropout_p, bool is_causal, std::optional<double> scale, \
      bool enable_gqa, int64_t window_left, int64_t window_right, double softcap,                 \
      const OptionalTensor &alibi_slopes, const OptionalTensor &sinks, bool is_bottom_right,      \
      const OptionalTensor &rng_state, const OptionalTensor &block_classes
// With `state` and `classes` in place of rng_state and block_classes.
#define FLASH_MPS_OPTIONS_WITH(state, classes)                                            \
  attn_mask, dropout_p, is_causal, scale, enable_gqa, window_left, window_right, softcap, \
      alibi_slopes, sinks, is_bottom_right, state, classes
#define FLASH_MPS_OPTIONS FLASH_MPS_OPTIONS_WITH(rng_state, block_classes)
// The fields of AttnOptions, from parameters of their names, that are plain numbers in every op.
#define FLASH_MPS_NUMBER_FIELDS                                                               \
  .dropout_p = dropout_p, .is_causal = is_causal, .scale = scale, .window_left = window_left, \
  .window_right = window_right, .softcap = softcap, .is_bottom_right = is_bottom_right

#define FLASH_MPS_PARAMETERS                                               \
  const at::Tensor &query, const at::Tensor &key, const at::Tensor &value, \
      FLASH_MPS_OPTION_PARAMETERS
#define FLASH_MPS_ARGUMENTS_WITH(state, classes) \
  query, key, value, FLASH_MPS_OPTIONS_WITH(state, classes)
#define FLASH_MPS_ARGUMENTS FLASH_MPS_ARGUMENTS_WITH(rng_state, block_classes)

#define FLASH_MPS_BACKWARD_PARAMETERS                                                  \
  const at::Tensor &grad_out, const OptionalTensor &grad_lse, const at::Tensor &query, \
      const at::Tensor &key, const at::Tensor &value, const at::Tensor &out,           \
      const at::Tensor &lse, FLASH_MPS_OPTION_PARAMETERS, std::array<bool, 5> output_mask
#define FLASH_MPS_BACKWARD_ARGUMENTS \
  grad_out, grad_lse, query, key, value, out, lse, FLASH_MPS_OPTIONS, output_mask

// check_inputs() of an op's arguments.
AttnProblem check_arguments(const char* op, FLASH_MPS_PARAMETERS);

// For ops without a gradient, at the Autograd key: an input that requires one is an error.
void without_gradients(const c10::OperatorHandle& op, torch::jit::Stack* stack);

at::Tensor attention_autograd(FLASH_MPS_PARAMETERS);
TensorPair attention_with_lse_autograd(FLASH_MPS_PARAMETERS);
FiveTensors attention_backward_autograd(FLASH_MPS_BACKWARD_PARAMETERS);

template <c10::DeviceType DEVICE>
at::Tensor attention_autocast(FLASH_MPS_PARAMETERS);
template <c10::DeviceType DEVICE>
TensorPair attention_with_lse_autocast(FLASH_MPS_PARAMETERS);

}  // namespace flash_mps
