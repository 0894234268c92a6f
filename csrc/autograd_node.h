// The Node behind the results of an attention op. Written by hand and not an autograd::Function: only
// so do the function transforms (torch.func) see it.
#pragma once

#include <torch/csrc/dynamo/compiled_autograd.h>

#include <array>
#include <mutex>
#include <tuple>
#include <vector>

#include "attn_args.h"
#include "autograd_rules.h"

namespace flash_mps {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// What the gradients of an op are made from, unpacked.
struct ForwardResults {
  at::Tensor out, lse, grad_out;
  OptionalTensor grad_lse;
};

// Saves what all attention ops take and return; an op adds what it alone takes. GRADIENTS inputs may
// have one.
template <size_t GRADIENTS>
class AttentionNode : public torch::autograd::Node {
 public:
  SavedVariable query, key, value, alibi_slopes, sinks, rng_state, out, lse;
  AttnOptions options;  // without its tensors, which are saved above

  static SavedVariable save(const OptionalTensor& input) {
    return SavedVariable(input, /*is_output=*/false);
  }

  void save_inputs(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                   const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
                   const OptionalTensor& rng_state) {
    this->query = save(query);
    this->key = save(key);
    this->value = save(value);
    this->alibi_slopes = save(alibi_slopes);
    this->sinks = save(sinks);
    this->rng_state = save(rng_state);
  }

  // Makes the results this node's; lse only if it goes to the caller.
  void own_results(const at::Tensor& result, const at::Tensor& result_lse, bool returns_lse) {
    torch::autograd::set_history(result, getptr());
    if (returns_lse) torch::autograd::set_history(result_lse, getptr());
    out = SavedVariable(result, /*is_output=*/true);
    lse = SavedVariable(result_lse, /*is_output=*/returns_lse);
  }

  // `grads` are those of out and, where the op returns it, of lse.
  variable_list apply(variable_list&& grads) final {
    const std::lock_guard<std::mutex> lock(mutex_);
    const OptionalTensor grad_lse =
        grads.size() > 1 && grads[1].defined() ? OptionalTensor(grads[1]) : std::nullopt;
    if (!grads[0].defined() && !grad_lse.has_value()) return variable_list(num_outputs());
    ForwardResults results{.out = unpack(out), .lse = unpack(lse), .grad_lse = grad_lse};
    results.grad_out = grads[0].defined() ? grads[0] : zeros_in_shape_of(results.out);
    std::array<bool, GRADIENTS> wanted;
    for (size_t i = 0; i < GRADIENTS; ++i) wanted[i] = task_should_compute_output(i);
    const std::array<at::Tensor, GRADIENTS> computed = backward(results, wanted);
    variable_list gradients(GRADIENTS);
    for (size_t i = 0; i < GRADIENTS; ++i) {
      if (wanted[i]) gradients[i] = computed[i];
    }
    return gradients;
  }

  void release_variables() final {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable* one : inputs_) one->reset_data();
    out.reset_data();
    lse.reset_data();
  }

  // Compiled autograd: what the node depends on, and backward with other tensors in their place.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    for (const SavedVariable* one : inputs_) args.collect(*one, /*is_output=*/false);
    args.collect(out, /*is_output=*/true);
    args.collect(lse, /*is_output=*/true);
    args.collect(options.enable_gqa);
    args.collect(options.dropout_p);
    args.collect(options.is_causal);
    args.collect(options.scale);
    args.collect(options.window_left);
    args.collect(options.window_right);
    args.collect(options.softcap);
    args.collect(options.is_bottom_right);
  }
  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& saved) override {
    for (SavedVariable* one : inputs_) saved.before(*one);
    saved.before(out);
    saved.before(lse);
    variable_list gradients = apply(variable_list(grads));
    for (SavedVariable* one : inputs_) saved.after(*one);
    saved.after(out);
    saved.after(lse);
    return gradients;
  }

 protected:
  // `own`: the members that hold what the op alone takes.
  explicit AttentionNode(std::initializer_list<SavedVariable*> own)
      : inputs_{&query, &key, &value, &alibi_slopes, &sinks, &rng_state} {
    inputs_.insert(inputs_.end(), own);
  }

  // The gradients, in the order of the next edges; one that is not wanted may hold anything.
  virtual std::array<at::Tensor, GRADIENTS> backward(const ForwardResults& results,
                                                     std::array<bool, GRADIENTS> wanted) = 0;

  at::Tensor unpack(const SavedVariable& saved) { return saved.unpack(getptr()); }
  OptionalTensor unpack_optional(const SavedVariable& saved) {
    const at::Tensor tensor = unpack(saved);
    return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
  }

 private:
  std::vector<SavedVariable*> inputs_;
};

// A tuple of tensors, as ops return it.
template <typename... Tensors>
std::array<at::Tensor, sizeof...(Tensors)> as_array(const std::tuple<Tensors...>& tensors) {
  return std::apply(
      [](const auto&... one) { return std::array<at::Tensor, sizeof...(Tensors)>{one...}; },
      tensors);
}

}  // namespace flash_mps
