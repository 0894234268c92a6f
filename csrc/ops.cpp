// Schemas of flash_mps and what runs at each dispatch key. The only TORCH_LIBRARY.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include "attention_cpu.h"
#include "attn_args.h"
#include "flash_fwd.h"

namespace flash_mps {

namespace {

using OptionalTensor = std::optional<at::Tensor>;
using TensorPair = std::tuple<at::Tensor, at::Tensor>;

#define FLASH_MPS_PARAMETERS                                                                   \
  const at::Tensor &query, const at::Tensor &key, const at::Tensor &value,                     \
      const OptionalTensor &attn_mask, double dropout_p, bool is_causal,                       \
      std::optional<double> scale, bool enable_gqa, int64_t window_left, int64_t window_right, \
      double softcap, const OptionalTensor &alibi_slopes, const OptionalTensor &sinks
#define FLASH_MPS_ARGUMENTS                                                           \
  query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, window_left, \
      window_right, softcap, alibi_slopes, sinks
#define FLASH_MPS_SCHEMA                                                                    \
  "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, "  \
  "bool is_causal=False, *, float? scale=None, bool enable_gqa=False, int window_left=-1, " \
  "int window_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None)"

AttnProblem check(const char* op, FLASH_MPS_PARAMETERS) {
  return check_inputs(op, query, key, value,
                      {.attn_mask = attn_mask,
                       .dropout_p = dropout_p,
                       .is_causal = is_causal,
                       .scale = scale,
                       .enable_gqa = enable_gqa,
                       .window_left = window_left,
                       .window_right = window_right,
                       .softcap = softcap,
                       .alibi_slopes = alibi_slopes,
                       .sinks = sinks});
}

constexpr const char* kAttention = "attention";
constexpr const char* kAttentionWithLse = "attention_with_lse";

at::Tensor attention_mps(FLASH_MPS_PARAMETERS) {
  return std::get<0>(flash_fwd(kAttention, check(kAttention, FLASH_MPS_ARGUMENTS), false));
}

TensorPair attention_with_lse_mps(FLASH_MPS_PARAMETERS) {
  return flash_fwd(kAttentionWithLse, check(kAttentionWithLse, FLASH_MPS_ARGUMENTS), true);
}

at::Tensor attention_on_cpu(FLASH_MPS_PARAMETERS) {
  return std::get<0>(attention_cpu(check(kAttention, FLASH_MPS_ARGUMENTS), false));
}

TensorPair attention_with_lse_on_cpu(FLASH_MPS_PARAMETERS) {
  return attention_cpu(check(kAttentionWithLse, FLASH_MPS_ARGUMENTS), true);
}

// There is no backward yet: an output that silently carried no gradient would be worse than an error.
void refuse_gradients(const char* op, const at::Tensor& query, const at::Tensor& key,
                      const at::Tensor& value, const OptionalTensor& attn_mask,
                      const OptionalTensor& alibi_slopes, const OptionalTensor& sinks) {
  if (!at::GradMode::is_enabled()) return;
  const auto refuse = [&](const char* operand, const at::Tensor& tensor) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !tensor.requires_grad(), "flash_mps::", op, ": expected ", operand,
        " without requires_grad, got requires_grad=True; gradients are not supported yet (call it "
        "under torch.no_grad())");
  };
  refuse("query", query);
  refuse("key", key);
  refuse("value", value);
  if (attn_mask.has_value()) refuse("attn_mask", *attn_mask);
  if (alibi_slopes.has_value()) refuse("alibi_slopes", *alibi_slopes);
  if (sinks.has_value()) refuse("sinks", *sinks);
}

at::Tensor attention_autograd(FLASH_MPS_PARAMETERS) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("flash_mps::attention", "")
                             .typed<decltype(attention_mps)>();
  refuse_gradients(kAttention, query, key, value, attn_mask, alibi_slopes, sinks);
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(FLASH_MPS_ARGUMENTS);
}

TensorPair attention_with_lse_autograd(FLASH_MPS_PARAMETERS) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("flash_mps::attention_with_lse", "")
                             .typed<decltype(attention_with_lse_mps)>();
  refuse_gradients(kAttentionWithLse, query, key, value, attn_mask, alibi_slopes, sinks);
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(FLASH_MPS_ARGUMENTS);
}

}  // namespace

TORCH_LIBRARY(flash_mps, m) {
  m.set_python_module("torch_flash_mps._ops");
  m.def("attention" FLASH_MPS_SCHEMA " -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("attention_with_lse" FLASH_MPS_SCHEMA " -> (Tensor, Tensor)", {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(flash_mps, MPS, m) {
  m.impl("attention", attention_mps);
  m.impl("attention_with_lse", attention_with_lse_mps);
}

TORCH_LIBRARY_IMPL(flash_mps, CPU, m) {
  m.impl("attention", attention_on_cpu);
  m.impl("attention_with_lse", attention_with_lse_on_cpu);
}

TORCH_LIBRARY_IMPL(flash_mps, Autograd, m) {
  m.impl("attention", attention_autograd);
  m.impl("attention_with_lse", attention_with_lse_autograd);
}

}  // namespace flash_mps
