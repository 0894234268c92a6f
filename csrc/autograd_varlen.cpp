// Gradients of the ops on packed sequences, as autograd.cpp has those of the others.

#include <ATen/core/LegacyTypeDispatch.h>

#include "attention_varlen.h"
#include "autograd_node.h"
#include "autograd_rules.h"
#include "score_args.h"

namespace flash_mps {

namespace {

FourTensors call_backward(FLASH_MPS_VARLEN_BACKWARD_PARAMETERS(c10::SymInt)) {
  static const auto op =
      find_op<decltype(attention_varlen_backward_autograd)>("flash_mps::attention_varlen_backward");
  return op.call(FLASH_MPS_VARLEN_BACKWARD_ARGUMENTS);
}

class AttentionVarlenBackward final : public AttentionNode<4> {
 public:
  SavedVariable cu_seqlens_q, cu_seqlens_k;
  c10::SymInt max_seqlen_q, max_seqlen_k;

  AttentionVarlenBackward() : AttentionNode({&cu_seqlens_q, &cu_seqlens_k}) {}
  std::string name() const override { return "FlashMpsAttentionVarlenBackward"; }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    AttentionNode::compiled_args(args);
    args.collect(max_seqlen_q);
    args.collect(max_seqlen_k);
  }
  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& saved) override {
    saved.before(max_seqlen_q);
    saved.before(max_seqlen_k);
    variable_list gradients = AttentionNode::apply_with_saved(grads, saved);
    saved.after(max_seqlen_q);
    saved.after(max_seqlen_k);
    return gradients;
  }

 private:
  std::array<at::Tensor, 4> backward(const ForwardResults& results,
                                     std::array<bool, 4> wanted) override {
    return as_array(call_backward(
        results.grad_out, results.grad_lse, unpack(query), unpack(key), unpack(value), results.out,
        results.lse, unpack(cu_seqlens_q), unpack(cu_seqlens_k), max_seqlen_q, max_seqlen_k,
        options.dropout_p, options.is_causal, options.scale, options.window_left,
        options.window_right, options.softcap, unpack_optional(alibi_slopes),
        unpack_optional(sinks), options.is_bottom_right, unpack_optional(rng_state), wanted));
  }
};

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
  node->save_inputs(query, key, value, alibi_slopes, sinks, rng_state);
  node->cu_seqlens_q = node->save(cu_seqlens_q);
  node->cu_seqlens_k = node->save(cu_seqlens_k);
  node->max_seqlen_q = max_seqlen_q;
  node->max_seqlen_k = max_seqlen_k;
  node->options = {FLASH_MPS_NUMBER_FIELDS};
  const auto [out, lse] = forward(FLASH_MPS_VARLEN_ARGUMENTS);
  node->own_results(out, lse, returns_lse);
  return {out, lse};
}

}  // namespace

at::Tensor attention_varlen_autograd(FLASH_MPS_VARLEN_PARAMETERS(c10::SymInt)) {
  if (needs_rng_state(dropout_p, rng_state)) {
    return attention_varlen_autograd(FLASH_MPS_VARLEN_ARGUMENTS_WITH(draw_rng_state()));
  }
  static const auto op =
      find_op<decltype(attention_varlen_autograd)>("flash_mps::attention_varlen");
  if (wants_gradients("attention_varlen", alibi_slopes, query, key, value, sinks)) {
    return std::get<0>(differentiable_forward(/*returns_lse=*/false, FLASH_MPS_VARLEN_ARGUMENTS));
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(FLASH_MPS_VARLEN_ARGUMENTS);
}

TensorPair attention_varlen_with_lse_autograd(FLASH_MPS_VARLEN_PARAMETERS(c10::SymInt)) {
  if (needs_rng_state(dropout_p, rng_state)) {
    return attention_varlen_with_lse_autograd(FLASH_MPS_VARLEN_ARGUMENTS_WITH(draw_rng_state()));
  }
  if (wants_gradients("attention_varlen_with_lse", alibi_slopes, query, key, value, sinks)) {
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
  refuse_double_backward(op, as_array(gradients), output_mask, grad_out, grad_lse, query, key,
                         value, out, lse, sinks);
  return gradients;
}

}  // namespace flash_mps
