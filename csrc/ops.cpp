// Schemas of flash_mps and what runs at each dispatch key. The only TORCH_LIBRARY.

#include "ops.h"

#include <ATen/Functions.h>
#include <torch/library.h>

#include "attention_cpu.h"
#include "attention_varlen.h"
#include "attn_args.h"
#include "backward_args.h"
#include "block_classes.h"
#include "flash_bwd.h"
#include "flash_decode.h"
#include "flash_fwd.h"
#include "flex_attention.h"
#include "kv_cache.h"
#include "kv_cache_cpu.h"

namespace flash_mps {

AttnProblem check_arguments(const char* op, FLASH_MPS_PARAMETERS) {
  return check_inputs(op, query, key, value,
                      {.attn_mask = attn_mask,
                       .enable_gqa = enable_gqa,
                       FLASH_MPS_NUMBER_FIELDS,
                       .alibi_slopes = alibi_slopes,
                       .sinks = sinks,
                       .rng_state = rng_state,
                       .block_classes = block_classes});
}

namespace {

#define FLASH_MPS_SCHEMA                                                                    \
  "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, "  \
  "bool is_causal=False, *, float? scale=None, bool enable_gqa=False, int window_left=-1, " \
  "int window_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, " \
  "bool is_bottom_right=False, Tensor? rng_state=None, Tensor? block_classes=None)"
#define FLASH_MPS_BACKWARD_SCHEMA                                                             \
  "(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, "  \
  "Tensor lse, Tensor? attn_mask, float dropout_p, bool is_causal, *, float? scale, "         \
  "bool enable_gqa, int window_left, int window_right, float softcap, Tensor? alibi_slopes, " \
  "Tensor? sinks, bool is_bottom_right, Tensor? rng_state, Tensor? block_classes=None, "      \
  "bool[5] output_mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"

#define FLASH_MPS_VARLEN_SCHEMA                                                              \
  "(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "      \
  "SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p=0.0, bool is_causal=False, *, " \
  "float? scale=None, int window_left=-1, int window_right=-1, float softcap=0.0, "          \
  "Tensor? alibi_slopes=None, Tensor? sinks=None, bool is_bottom_right=False, "              \
  "Tensor? rng_state=None)"
#define FLASH_MPS_VARLEN_BACKWARD_SCHEMA                                                         \
  "(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, "     \
  "Tensor lse, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "                  \
  "SymInt max_seqlen_k, float dropout_p, bool is_causal, *, float? scale, int window_left, "     \
  "int window_right, float softcap, Tensor? alibi_slopes, Tensor? sinks, bool is_bottom_right, " \
  "Tensor? rng_state, bool[4] output_mask) -> (Tensor, Tensor, Tensor, Tensor)"

#define FLASH_MPS_WITH_KVCACHE_SCHEMA                                                          \
  "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, bool is_causal=False, *, " \
  "float? scale=None, Tensor? k_scale=None, Tensor? v_scale=None, Tensor? seqlens_k=None, "    \
  "SymInt seqlen_new=0, Tensor? leftpad_k=None, Tensor? cache_batch_idx=None, "                \
  "Tensor? block_table=None, int num_splits=0, "                                               \
  "int window_left=-1, int window_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, "    \
  "Tensor? sinks=None) -> (Tensor out, Tensor lse)"
// `code`: Metal source in place of metal/user_score.h, which reads `captured`.
#define FLASH_MPS_FLEX_SCHEMA                                             \
  "Tensor query, Tensor key, Tensor value, Tensor[] captured, str code, " \
  "Tensor? block_classes=None, *, float? scale=None, bool enable_gqa=False, "
#define FLASH_MPS_KV_APPEND_SCHEMA                                                                \
  "(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor key, Tensor value, *, "                  \
  "Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None, Tensor? seqlens=None, SymInt position=0, " \
  "Tensor? leftpad=None, Tensor? cache_batch_idx=None, Tensor? block_table=None, "                \
  "Tensor? rotary_cos=None, Tensor? rotary_sin=None, bool rotary_interleaved=False) -> ()"
#define FLASH_MPS_ROTARY_SCHEMA                                                     \
  "(Tensor x, Tensor cos, Tensor sin, *, Tensor? seqlens=None, SymInt position=0, " \
  "Tensor? leftpad=None, bool interleaved=False, bool is_advancing=True) -> Tensor"

constexpr const char* kAttention = "attention";
constexpr const char* kAttentionWithLse = "attention_with_lse";
constexpr const char* kAttentionBackward = "attention_backward";
constexpr const char* kAttentionWithKvCache = "attention_with_kvcache";

at::Tensor attention_mps(FLASH_MPS_PARAMETERS) {
  const AttnProblem problem = check_arguments(kAttention, FLASH_MPS_ARGUMENTS);
  return std::get<0>(
      flash_fwd(kAttention, with_block_classes(problem, runs_decode(problem)), false));
}

TensorPair attention_with_lse_mps(FLASH_MPS_PARAMETERS) {
  const AttnProblem problem = check_arguments(kAttentionWithLse, FLASH_MPS_ARGUMENTS);
  return flash_fwd(kAttentionWithLse, with_block_classes(problem, runs_decode(problem)), true);
}

TensorPair attention_with_kvcache_mps(FLASH_MPS_WITH_KVCACHE_PARAMETERS) {
  return flash_decode_cached(kAttentionWithKvCache,
                             cached_attention_arguments(FLASH_MPS_WITH_KVCACHE_ARGUMENTS));
}

at::Tensor attention_on_cpu(FLASH_MPS_PARAMETERS) {
  return std::get<0>(attention_cpu(check_arguments(kAttention, FLASH_MPS_ARGUMENTS), false));
}

TensorPair attention_with_lse_on_cpu(FLASH_MPS_PARAMETERS) {
  return attention_cpu(check_arguments(kAttentionWithLse, FLASH_MPS_ARGUMENTS), true);
}

template <BackwardKernel& KERNEL>
FiveTensors attention_backward(FLASH_MPS_BACKWARD_PARAMETERS) {
  // Backward may run under autocast, which must not reach the torch ops in here.
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  check_rng_state(kAttentionBackward, dropout_p, rng_state);
  const AttnProblem problem = check_arguments(kAttentionBackward, FLASH_MPS_ARGUMENTS);
  const auto [wants_query, wants_key, wants_value, wants_mask, wants_sinks] = output_mask;
  const AttnGradients gradients = checked_backward<KERNEL>(
      kAttentionBackward, problem, out, lse, grad_out, grad_lse.value_or(at::Tensor()),
      {.query = wants_query,
       .key = wants_key,
       .value = wants_value,
       .mask = wants_mask,
       .sinks = wants_sinks});
  const auto result = [&](const at::Tensor& gradient, const OptionalTensor& input) {
    return gradient.defined() ? restore_operand(problem, gradient, *input) : no_gradient(query);
  };
  return {result(gradients.query, query), result(gradients.key, key),
          result(gradients.value, value), result(gradients.mask, attn_mask),
          wants_sinks ? gradients.sinks.to(sinks->scalar_type()) : no_gradient(query)};
}

}  // namespace

TORCH_LIBRARY(flash_mps, m) {
  m.set_python_module("torch_flash_mps._ops");
  m.def("attention" FLASH_MPS_SCHEMA " -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("attention_with_lse" FLASH_MPS_SCHEMA " -> (Tensor, Tensor)", {at::Tag::pt2_compliant_tag});
  m.def("attention_backward" FLASH_MPS_BACKWARD_SCHEMA, {at::Tag::pt2_compliant_tag});
  m.def("attention_varlen" FLASH_MPS_VARLEN_SCHEMA " -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("attention_varlen_with_lse" FLASH_MPS_VARLEN_SCHEMA " -> (Tensor, Tensor)",
        {at::Tag::pt2_compliant_tag});
  m.def("attention_varlen_backward" FLASH_MPS_VARLEN_BACKWARD_SCHEMA, {at::Tag::pt2_compliant_tag});
  m.def("mask_block_classes(Tensor attn_mask) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("flex_attention(" FLASH_MPS_FLEX_SCHEMA
        "bool for_backward=False) -> (Tensor out, Tensor lse)",
        {at::Tag::pt2_compliant_tag});
  m.def(
      "flex_attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor "
      "lse, " FLASH_MPS_FLEX_SCHEMA "bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def("attention_with_kvcache" FLASH_MPS_WITH_KVCACHE_SCHEMA, {at::Tag::pt2_compliant_tag});
  m.def("kvcache_append_" FLASH_MPS_KV_APPEND_SCHEMA, {at::Tag::pt2_compliant_tag});
  m.def("rotary_embedding" FLASH_MPS_ROTARY_SCHEMA, {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(flash_mps, MPS, m) {
  m.impl("attention", attention_mps);
  m.impl("attention_with_lse", attention_with_lse_mps);
  m.impl("attention_backward", attention_backward<flash_bwd>);
  m.impl("attention_varlen", attention_varlen_mps);
  m.impl("attention_varlen_with_lse", attention_varlen_with_lse_mps);
  m.impl("attention_varlen_backward", attention_varlen_backward_mps);
  m.impl("mask_block_classes", mask_block_classes_mps);
  m.impl("flex_attention", flex_attention);
  m.impl("flex_attention_backward", flex_attention_backward);
  m.impl("attention_with_kvcache", attention_with_kvcache_mps);
  m.impl("kvcache_append_", kvcache_append_mps);
  m.impl("rotary_embedding", rotary_embedding_mps);
}

TORCH_LIBRARY_IMPL(flash_mps, CPU, m) {
  m.impl("attention", attention_on_cpu);
  m.impl("attention_with_lse", attention_with_lse_on_cpu);
  m.impl("attention_backward", attention_backward<attention_backward_cpu>);
  m.impl("attention_varlen", attention_varlen_cpu);
  m.impl("attention_varlen_with_lse", attention_varlen_with_lse_cpu);
  m.impl("attention_varlen_backward", attention_varlen_backward_cpu);
  m.impl("mask_block_classes", mask_block_classes_cpu);
  m.impl("attention_with_kvcache", attention_with_kvcache_cpu);
  m.impl("kvcache_append_", kvcache_append_cpu);
  m.impl("rotary_embedding", rotary_embedding_cpu);
}

TORCH_LIBRARY_IMPL(flash_mps, Autograd, m) {
  m.impl("attention", attention_autograd);
  m.impl("attention_with_lse", attention_with_lse_autograd);
  m.impl("attention_backward", attention_backward_autograd);
  m.impl("attention_varlen", attention_varlen_autograd);
  m.impl("attention_varlen_with_lse", attention_varlen_with_lse_autograd);
  m.impl("attention_varlen_backward", attention_varlen_backward_autograd);
  m.impl("mask_block_classes", torch::CppFunction::makeFallthrough());  // of integers
  for (const char* op : {"flex_attention", "flex_attention_backward", "attention_with_kvcache",
                         "kvcache_append_", "rotary_embedding"}) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&without_gradients>());
  }
}

TORCH_LIBRARY_IMPL(flash_mps, AutocastMPS, m) {
  m.impl("attention", attention_autocast<at::kMPS>);
  m.impl("attention_with_lse", attention_with_lse_autocast<at::kMPS>);
  m.impl("attention_varlen", attention_varlen_autocast<at::kMPS>);
  m.impl("attention_varlen_with_lse", attention_varlen_with_lse_autocast<at::kMPS>);
}

TORCH_LIBRARY_IMPL(flash_mps, AutocastCPU, m) {
  m.impl("attention", attention_autocast<at::kCPU>);
  m.impl("attention_with_lse", attention_with_lse_autocast<at::kCPU>);
  m.impl("attention_varlen", attention_varlen_autocast<at::kCPU>);
  m.impl("attention_varlen_with_lse", attention_varlen_with_lse_autocast<at::kCPU>);
}

}  // namespace flash_mps
