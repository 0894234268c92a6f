// Gradients of the attention ops. A Node written by hand and not an autograd::Function: only so do
// the function transforms (torch.func) see it.

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>

#include "attn_args.h"
#include "autograd_rules.h"
#include "block_classes.h"
#include "ops.h"
#include "score_args.h"

namespace flash_mps {

namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

FiveTensors call_backward(FLASH_MPS_BACKWARD_PARAMETERS) {
  static const auto op =
      find_op<decltype(attention_backward_autograd)>("flash_mps::attention_backward");
  return op.call(FLASH_MPS_BACKWARD_ARGUMENTS);
}

struct AttentionBackward : torch::autograd::Node {
  SavedVariable query, key, value, out, lse, attn_mask, alibi_slopes, sinks, rng_state,
      block_classes;
  AttnOptions options;  // without its tensors, which are saved above

  std::string name() const override { return "FlashMpsAttentionBackward"; }

  // `grads` are those of out and, where the op returns it, of lse.
  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const at::Tensor grad_lse = grads.size() > 1 ? grads[1] : at::Tensor();
    if (!grads[0].defined() && !grad_lse.defined()) return variable_list(num_outputs());
    const auto self = getptr();
    const auto optional = [&](const SavedVariable& saved) {
      const at::Tensor tensor = saved.unpack(self);
      return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
    };
    const at::Tensor result = out.unpack(self);
    std::array<bool, 5> wanted;
    for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = task_should_compute_output(i);
    const FiveTensors gradients = call_backward(
        grads[0].defined() ? grads[0] : zeros_in_shape_of(result),
        grad_lse.defined() ? OptionalTensor(grad_lse) : std::nullopt, query.unpack(self),
        key.unpack(self), value.unpack(self), result, lse.unpack(self), optional(attn_mask),
        options.dropout_p, options.is_causal, options.scale, options.enable_gqa,
        options.window_left, options.window_right, options.softcap, optional(alibi_slopes),
        optional(sinks), options.is_bottom_right, optional(rng_state), optional(block_classes),
        wanted);
    const auto& [grad_query, grad_key, grad_value, grad_mask, grad_sinks] = gradients;
    variable_list results = {grad_query, grad_key, grad_value, grad_mask, grad_sinks};
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (!wanted[i]) results[i] = at::Tensor();
    }
    return results;
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable* one : tensors()) one->reset_data();
  }

  // Compiled autograd: what the node depends on, and backward with other tensors in their place.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    for (const SavedVariable* one :
         {&query, &key, &value, &attn_mask, &alibi_slopes, &sinks, &rng_state, &block_classes}) {
      args.collect(*one, false);
    }
    args.collect(out, true);
    args.collect(lse, true);
    args.collect(options.dropout_p);
    args.collect(options.is_causal);
    args.collect(options.scale);
    args.collect(options.enable_gqa);
    args.collect(options.window_left);
    args.collect(options.window_right);
    args.collect(options.softcap);
    args.collect(options.is_bottom_right);
  }
  variable_list apply_with_saved(const variable_list& inputs,
                                 torch::dynamo::autograd::SwapSavedVariables& saved) override {
    for (SavedVariable* one : tensors()) saved.before(*one);
    variable_list gradients = apply(variable_list(inputs));
    for (SavedVariable* one : tensors()) saved.after(*one);
    return gradients;
  }

 private:
  std::array<SavedVariable*, 10> tensors() {
    return {&query,     &key,          &value, &out,       &lse,
            &attn_mask, &alibi_slopes, &sinks, &rng_state, &block_classes};
  }
};

bool wants_gradients(const char* op, const at::Tensor& query, const at::Tensor& key,
                     const at::Tensor& value, const OptionalTensor& attn_mask,
                     const OptionalTensor& alibi_slopes, const OptionalTensor& sinks) {
  refuse_forward_mode(op, query, key, value, attn_mask, alibi_slopes, sinks);
  if (!at::GradMode::is_enabled()) return false;
  refuse_gradient(op, "alibi_slopes", alibi_slopes);
  return torch::autograd::compute_requires_grad(query, key, value, attn_mask, sinks);
}

// The classes of the mask's blocks where forward and backward together have use for them. Where sizes
// are not known yet (torch.compile), each of them finds out for itself.
OptionalTensor classes_of_call(const at::Tensor& query, const at::Tensor& key,
                               const at::Tensor& value, const OptionalTensor& attn_mask) {
  if (!attn_mask.has_value() || !attn_mask->is_mps()) return {};
  for (const at::Tensor* tensor : {&query, &key, &value, &*attn_mask}) {
    if (tensor->unsafeGetTensorImpl()->has_symbolic_sizes_strides() || tensor->dim() < 2) return {};
  }
  const double rows = static_cast<double>(query.numel()) /
                      static_cast<double>(std::max<int64_t>(query.size(-1), 1));
  if (!classifies_mask(*attn_mask, rows * static_cast<double>(key.size(-2)),
                       query.size(-1) + value.size(-1))) {
    return {};
  }
  static const auto op = find_op<at::Tensor(const at::Tensor&)>("flash_mps::mask_block_classes");
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(without_repeats(*attn_mask));
}

// Out and lse without a history.
TensorPair forward(FLASH_MPS_PARAMETERS) {
  static const auto op =
      find_op<decltype(attention_with_lse_autograd)>("flash_mps::attention_with_lse");
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(FLASH_MPS_ARGUMENTS);
}

// Out and lse, out with a history and, if it goes to the caller, lse too.
TensorPair differentiable_forward(bool returns_lse, FLASH_MPS_PARAMETERS) {
  const OptionalTensor classes =
      block_classes.has_value() ? block_classes : classes_of_call(query, key, value, attn_mask);
  auto node = c10::make_intrusive<AttentionBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(query, key, value, attn_mask, sinks));
  node->query = SavedVariable(query, /*is_output=*/false);
  node->key = SavedVariable(key, /*is_output=*/false);
  node->value = SavedVariable(value, /*is_output=*/false);
  node->attn_mask = SavedVariable(attn_mask, /*is_output=*/false);
  node->alibi_slopes = SavedVariable(alibi_slopes, /*is_output=*/false);
  node->sinks = SavedVariable(sinks, /*is_output=*/false);
  node->rng_state = SavedVariable(rng_state, /*is_output=*/false);
  node->block_classes = SavedVariable(classes, /*is_output=*/false);
  node->options = {.dropout_p = dropout_p,
                   .is_causal = is_causal,
                   .scale = scale,
                   .enable_gqa = enable_gqa,
                   .window_left = window_left,
                   .window_right = window_right,
                   .softcap = softcap,
                   .is_bottom_right = is_bottom_right};
  const auto [out, lse] = forward(FLASH_MPS_ARGUMENTS_WITH(rng_state, classes));
  torch::autograd::set_history(out, node);
  if (returns_lse) torch::autograd::set_history(lse, node);
  node->out = SavedVariable(out, /*is_output=*/true);
  node->lse = SavedVariable(lse, /*is_output=*/returns_lse);
  return {out, lse};
}

}  // namespace

void without_gradients(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  std::vector<at::Tensor> written;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!values[i].isTensor()) continue;
    const at::Tensor& tensor = values[i].toTensor();
    const bool has_gradient = at::GradMode::is_enabled() && tensor.requires_grad();
    TORCH_CHECK(!has_gradient && !torch::autograd::isFwGradDefined(tensor), op.schema().name(),
                ": expected ", arguments[i].name(),
                " without requires_grad, got one that requires "
                "it; the op has no gradient, call it under torch.no_grad()");
    if (arguments[i].alias_info() != nullptr) written.push_back(tensor);
  }
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    op.callBoxed(stack);
  }
  for (const at::Tensor& tensor : written) torch::autograd::increment_version(tensor);
}

at::Tensor attention_autograd(FLASH_MPS_PARAMETERS) {
  if (needs_rng_state(dropout_p, rng_state)) {
    return attention_autograd(FLASH_MPS_ARGUMENTS_WITH(draw_rng_state(), block_classes));
  }
  static const auto op = find_op<decltype(attention_autograd)>("flash_mps::attention");
  if (wants_gradients("attention", query, key, value, attn_mask, alibi_slopes, sinks)) {
    return std::get<0>(differentiable_forward(/*returns_lse=*/false, FLASH_MPS_ARGUMENTS));
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(FLASH_MPS_ARGUMENTS);
}

TensorPair attention_with_lse_autograd(FLASH_MPS_PARAMETERS) {
  if (needs_rng_state(dropout_p, rng_state)) {
    return attention_with_lse_autograd(FLASH_MPS_ARGUMENTS_WITH(draw_rng_state(), block_classes));
  }
  if (wants_gradients("attention_with_lse", query, key, value, attn_mask, alibi_slopes, sinks)) {
    return differentiable_forward(/*returns_lse=*/true, FLASH_MPS_ARGUMENTS);
  }
  return forward(FLASH_MPS_ARGUMENTS);
}

FiveTensors attention_backward_autograd(FLASH_MPS_BACKWARD_PARAMETERS) {
  refuse_forward_mode("attention_backward", grad_out, grad_lse, query, key, value, out, lse,
                      attn_mask, sinks);
  FiveTensors gradients;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    gradients = call_backward(FLASH_MPS_BACKWARD_ARGUMENTS);
  }
  const auto& [grad_query, grad_key, grad_value, grad_mask, grad_sinks] = gradients;
  const std::array<at::Tensor, 5> all = {grad_query, grad_key, grad_value, grad_mask, grad_sinks};
  std::vector<at::Tensor> wanted;
  for (size_t i = 0; i < all.size(); ++i) {
    if (output_mask[i]) wanted.push_back(all[i]);
  }
  refuse_double_backward("attention_backward", wanted, grad_out, grad_lse, query, key, value, out,
                         lse, attn_mask, sinks);
  return gradients;
}

}  // namespace flash_mps
