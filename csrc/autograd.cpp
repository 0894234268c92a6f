// Gradients of the attention ops.

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>

#include "attn_args.h"
#include "autograd_node.h"
#include "autograd_rules.h"
#include "block_classes.h"
#include "ops.h"
#include "score_args.h"

namespace flash_mps {

namespace {

FiveTensors call_backward(FLASH_MPS_BACKWARD_PARAMETERS) {
  static const auto op =
      find_op<decltype(attention_backward_autograd)>("flash_mps::attention_backward");
  return op.call(FLASH_MPS_BACKWARD_ARGUMENTS);
}

class AttentionBackward final : public AttentionNode<5> {
 public:
  SavedVariable attn_mask, block_classes;

  AttentionBackward() : AttentionNode({&attn_mask, &block_classes}) {}
  std::string name() const override { return "FlashMpsAttentionBackward"; }

 private:
  std::array<at::Tensor, 5> backward(const ForwardResults& results,
                                     std::array<bool, 5> wanted) override {
    return as_array(
        call_backward(results.grad_out, results.grad_lse, unpack(query), unpack(key), unpack(value),
                      results.out, results.lse, unpack_optional(attn_mask), options.dropout_p,
                      options.is_causal, options.scale, options.enable_gqa, options.window_left,
                      options.window_right, options.softcap, unpack_optional(alibi_slopes),
                      unpack_optional(sinks), options.is_bottom_right, unpack_optional(rng_state),
                      unpack_optional(block_classes), wanted));
  }
};

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
  node->save_inputs(query, key, value, alibi_slopes, sinks, rng_state);
  node->attn_mask = node->save(attn_mask);
  node->block_classes = node->save(classes);
  node->options = {.enable_gqa = enable_gqa, FLASH_MPS_NUMBER_FIELDS};
  const auto [out, lse] = forward(FLASH_MPS_ARGUMENTS_WITH(rng_state, classes));
  node->own_results(out, lse, returns_lse);
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
  if (wants_gradients("attention", alibi_slopes, query, key, value, attn_mask, sinks)) {
    return std::get<0>(differentiable_forward(/*returns_lse=*/false, FLASH_MPS_ARGUMENTS));
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(FLASH_MPS_ARGUMENTS);
}

TensorPair attention_with_lse_autograd(FLASH_MPS_PARAMETERS) {
  if (needs_rng_state(dropout_p, rng_state)) {
    return attention_with_lse_autograd(FLASH_MPS_ARGUMENTS_WITH(draw_rng_state(), block_classes));
  }
  if (wants_gradients("attention_with_lse", alibi_slopes, query, key, value, attn_mask, sinks)) {
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
  refuse_double_backward("attention_backward", as_array(gradients), output_mask, grad_out, grad_lse,
                         query, key, value, out, lse, attn_mask, sinks);
  return gradients;
}

}  // namespace flash_mps
