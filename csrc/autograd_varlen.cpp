// Gradients of the ops on packed sequences, as autograd.cpp has those of the others.

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include "attention_varlen.h"
#include "autograd_rules.h"
#include "score_args.h"

namespace flash_mps {

namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

FourTensors call_backward(FLASH_MPS_VARLEN_BACKWARD_PARAMETERS(c10::SymInt)) {
  static const auto op =
      find_op<decltype(attention_varlen_backward_autograd)>("flash_mps::attention_varlen_backward");
  return op.call(FLASH_MPS_VARLEN_BACKWARD_ARGUMENTS);
}

struct AttentionVarlenBackward : torch::autograd::Node {
  SavedVariable query, key, value, out, lse, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks,
      rng_state;
  c10::SymInt max_seqlen_q, max_seqlen_k;
  AttnOptions options;  // without its tensors, which are saved above

  std::string name() const override { return "FlashMpsAttentionVarlenBackward"; }

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
    std::array<bool, 4> wanted;
    for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = task_should_compute_output(i);
    const FourTensors gradients = call_backward(
        grads[0].defined() ? grads[0] : zeros_in_shape_of(result),
        grad_lse.defined() ? OptionalTensor(grad_lse) : std::nullopt, query.unpack(self),
        key.unpack(self), value.unpack(self), result, lse.unpack(self), cu_seqlens_q.unpack(self),
        cu_seqlens_k.unpack(self), max_seqlen_q, max_seqlen_k, options.dropout_p, options.is_causal,
        options.scale, options.window_left, options.window_right, options.softcap,
        optional(alibi_slopes), optional(sinks), options.is_bottom_right, optional(rng_state),
        wanted);
    const auto& [grad_query, grad_key, grad_value, grad_sinks] = gradients;
    variable_list results = {grad_query, grad_key, grad_value, grad_sinks};
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
         {&query, &key, &value, &cu_seqlens_q, &cu_seqlens_k, &alibi_slopes, &sinks, &rng_state}) {
      args.collect(*one, false);
    }
    args.collect(out, true);
    args.collect(lse, true);
    args.collect(max_seqlen_q);
    args.collect(max_seqlen_k);
    args.collect(options.dropout_p);
    args.collect(options.is_causal);
    args.collect(options.scale);
    args.collect(options.window_left);
    args.collect(options.window_right);
    args.collect(options.softcap);
    args.collect(options.is_bottom_right);
  }
  variable_list apply_with_saved(const variable_list& inputs,
                                 torch::dynamo::autograd::SwapSavedVariables& saved) override {
    for (SavedVariable* one : tensors()) saved.before(*one);
    saved.before(max_seqlen_q);
    saved.before(max_seqlen_k);
    variable_list gradients = apply(variable_list(inputs));
    for (SavedVariable* one : tensors()) saved.after(*one);
    saved.after(max_seqlen_q);
    saved.after(max_seqlen_k);
    return gradients;
  }

 private:
  std::array<SavedVariable*, 10> tensors() {
    return {&query,        &key,          &value,        &out,   &lse,
            &cu_seqlens_q, &cu_seqlens_k, &alibi_slopes, &sinks, &rng_state};
  }
};

bool wants_gradients(const char* op, const at::Tensor& query, const at::Tensor& key,
                     const at::Tensor& value, const OptionalTensor& alibi_slopes,
                     const OptionalTensor& sinks) {
  refuse_forward_mode(op, query, key, value, alibi_slopes, sinks);
  if (!at::GradMode::is_enabled()) return false;
  refuse_gradient(op, "alibi_slopes", alibi_slopes);
  return torch::autograd::compute_requires_grad(query, key, value, sinks);
}

// Out and lse without a history.
TensorPair forward(FLASH_MPS_VARLEN_PARAMETERS(c10::SymInt)) {
  static const auto op =
      find_op<decltype(attention_varlen_with_lse_autograd)>("flash_mps::attention_varlen_with_lse");
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(FLASH_MPS_VARLEN_ARGUMENTS);
}

// Out and lse, out with a history and, if it goes to the caller, lse too.
TensorPair differentiable_forward(bool returns_lse, FLASH_MPS_VARLEN_PARAMETERS(c10::SymInt)) {
  auto node = c10::make_intrusive<AttentionVarlenBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(query, key, value, sinks));
  node->query = SavedVariable(query, /*is_output=*/false);
  node->key = SavedVariable(key, /*is_output=*/false);
  node->value = SavedVariable(value, /*is_output=*/false);
  node->cu_seqlens_q = SavedVariable(cu_seqlens_q, /*is_output=*/false);
  node->cu_seqlens_k = SavedVariable(cu_seqlens_k, /*is_output=*/false);
  node->alibi_slopes = SavedVariable(alibi_slopes, /*is_output=*/false);
  node->sinks = SavedVariable(sinks, /*is_output=*/false);
  node->rng_state = SavedVariable(rng_state, /*is_output=*/false);
  node->max_seqlen_q = max_seqlen_q;
  node->max_seqlen_k = max_seqlen_k;
  node->options = {.dropout_p = dropout_p,
                   .is_causal = is_causal,
                   .scale = scale,
                   .window_left = window_left,
                   .window_right = window_right,
                   .softcap = softcap,
                   .is_bottom_right = is_bottom_right};
  const auto [out, lse] = forward(FLASH_MPS_VARLEN_ARGUMENTS);
  torch::autograd::set_history(out, node);
  if (returns_lse) torch::autograd::set_history(lse, node);
  node->out = SavedVariable(out, /*is_output=*/true);
  node->lse = SavedVariable(lse, /*is_output=*/returns_lse);
  return {out, lse};
}

}  // namespace

at::Tensor attention_varlen_autograd(FLASH_MPS_VARLEN_PARAMETERS(c10::SymInt)) {
  if (needs_rng_state(dropout_p, rng_state)) {
    return attention_varlen_autograd(FLASH_MPS_VARLEN_ARGUMENTS_WITH(draw_rng_state()));
  }
  static const auto op =
      find_op<decltype(attention_varlen_autograd)>("flash_mps::attention_varlen");
  if (wants_gradients("attention_varlen", query, key, value, alibi_slopes, sinks)) {
    return std::get<0>(differentiable_forward(/*returns_lse=*/false, FLASH_MPS_VARLEN_ARGUMENTS));
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(FLASH_MPS_VARLEN_ARGUMENTS);
}

TensorPair attention_varlen_with_lse_autograd(FLASH_MPS_VARLEN_PARAMETERS(c10::SymInt)) {
  if (needs_rng_state(dropout_p, rng_state)) {
    return attention_varlen_with_lse_autograd(FLASH_MPS_VARLEN_ARGUMENTS_WITH(draw_rng_state()));
  }
  if (wants_gradients("attention_varlen_with_lse", query, key, value, alibi_slopes, sinks)) {
    return differentiable_forward(/*returns_lse=*/true, FLASH_MPS_VARLEN_ARGUMENTS);
  }
  return forward(FLASH_MPS_VARLEN_ARGUMENTS);
}

FourTensors attention_varlen_backward_autograd(FLASH_MPS_VARLEN_BACKWARD_PARAMETERS(c10::SymInt)) {
  constexpr const char* op = "attention_varlen_backward";
  refuse_forward_mode(op, grad_out, grad_lse, query, key, value, out, lse, sinks);
  FourTensors gradients;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    gradients = call_backward(FLASH_MPS_VARLEN_BACKWARD_ARGUMENTS);
  }
  const auto& [grad_query, grad_key, grad_value, grad_sinks] = gradients;
  const std::array<at::Tensor, 4> all = {grad_query, grad_key, grad_value, grad_sinks};
  std::vector<at::Tensor> wanted;
  for (size_t i = 0; i < all.size(); ++i) {
    if (output_mask[i]) wanted.push_back(all[i]);
  }
  refuse_double_backward(op, wanted, grad_out, grad_lse, query, key, value, out, lse, sinks);
  return gradients;
}

}  // namespace flash_mps
