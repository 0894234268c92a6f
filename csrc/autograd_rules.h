// What the Autograd kernels of all attention ops share.
#pragma once

#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <array>
#include <string>

#include "attn_args.h"

namespace flash_mps {

inline constexpr const char* kWayRound =
    "; F.scaled_dot_product_attention has it, under "
    "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)";

template <typename Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// A zero in the shape of `tensor`, without its memory.
inline at::Tensor zeros_in_shape_of(const at::Tensor& tensor) {
  return at::zeros({}, tensor.options()).expand_symint(tensor.sym_sizes());
}

template <typename... Tensors>
void refuse_forward_mode(const char* op, const Tensors&... tensors) {
  TORCH_CHECK_NOT_IMPLEMENTED(!(torch::autograd::isFwGradDefined(tensors) || ...),
                              "flash_mps::", op, ": forward-mode differentiation is not supported",
                              kWayRound);
}

inline void refuse_gradient(const char* op, const char* option, const OptionalTensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(!(tensor.has_value() && tensor->requires_grad()), "flash_mps::", op,
                              ": the gradient of ", option, " is not supported yet; expected ",
                              option, " without requires_grad");
}

// Whether an op is to save its inputs; `inputs` are those that may have a gradient.
template <typename... Tensors>
bool wants_gradients(const char* op, const OptionalTensor& alibi_slopes, const Tensors&... inputs) {
  refuse_forward_mode(op, alibi_slopes, inputs...);
  if (!at::GradMode::is_enabled()) return false;
  refuse_gradient(op, "alibi_slopes", alibi_slopes);
  return torch::autograd::compute_requires_grad(inputs...);
}

// Dropout draws its state at the Autograd key, so that backward and torch.compile see it as a tensor.
inline bool needs_rng_state(double dropout_p, const OptionalTensor& rng_state) {
  return dropout_p > 0.0 && !rng_state.has_value();
}

// Gradients of gradients: asking for them (create_graph=True) is fine, using them is an error.
template <size_t GRADIENTS, typename... Tensors>
void refuse_double_backward(const char* op, const std::array<at::Tensor, GRADIENTS>& gradients,
                            std::array<bool, GRADIENTS> wanted, const Tensors&... inputs) {
  if (!torch::autograd::compute_requires_grad(inputs...)) return;
  const auto node = c10::make_intrusive<torch::autograd::Error>(
      std::string("flash_mps::") + op + ": double backward is not supported" + kWayRound,
      torch::autograd::collect_next_edges(inputs...));
  for (size_t i = 0; i < GRADIENTS; ++i) {
    if (wanted[i]) torch::autograd::set_history(gradients[i], node);
  }
}

}  // namespace flash_mps
