// The attention ops under torch.autocast: operands in its dtype, as F.scaled_dot_product_attention.

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "attention_varlen.h"
#include "ops.h"

namespace flash_mps {

namespace {

// A float32 mask stays as it is: the op adds it in float32, and in half precision large negative
// numbers would become -inf, which hides keys.
OptionalTensor cast_mask(at::ScalarType type, const OptionalTensor& mask, c10::DeviceType device) {
  const bool is_float = mask.has_value() && mask->scalar_type() == at::kFloat;
  return is_float ? mask : at::autocast::cached_cast(type, mask, device);
}

// Slopes and sinks, which go with a query of any dtype when they are float32.
OptionalTensor cast_per_head(const OptionalTensor& tensor, c10::DeviceType device) {
  return at::autocast::cached_cast(at::kFloat, tensor, device);
}

template <c10::DeviceType DEVICE, typename Result>
Result call_in_autocast_dtype(const char* name, FLASH_MPS_PARAMETERS) {
  const c10::impl::ExcludeDispatchKeyGuard guard(
      at::autocast::get_autocast_dispatch_key_from_device_type(DEVICE));
  const at::ScalarType type = at::autocast::get_autocast_dtype(DEVICE);
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<Result(FLASH_MPS_PARAMETERS)>()
      .call(at::autocast::cached_cast(type, query, DEVICE),
            at::autocast::cached_cast(type, key, DEVICE),
            at::autocast::cached_cast(type, value, DEVICE), cast_mask(type, attn_mask, DEVICE),
            dropout_p, is_causal, scale, enable_gqa, window_left, window_right, softcap,
            cast_per_head(alibi_slopes, DEVICE), cast_per_head(sinks, DEVICE), is_bottom_right,
            rng_state, block_classes);
}

template <c10::DeviceType DEVICE, typename Result>
Result call_varlen_in_autocast_dtype(const char* name, FLASH_MPS_VARLEN_PARAMETERS(c10::SymInt)) {
  const c10::impl::ExcludeDispatchKeyGuard guard(
      at::autocast::get_autocast_dispatch_key_from_device_type(DEVICE));
  const at::ScalarType type = at::autocast::get_autocast_dtype(DEVICE);
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<Result(FLASH_MPS_VARLEN_PARAMETERS(c10::SymInt))>()
      .call(at::autocast::cached_cast(type, query, DEVICE),
            at::autocast::cached_cast(type, key, DEVICE),
            at::autocast::cached_cast(type, value, DEVICE), cu_seqlens_q, cu_seqlens_k,
            max_seqlen_q, max_seqlen_k, dropout_p, is_causal, scale, window_left, window_right,
            softcap, cast_per_head(alibi_slopes, DEVICE), cast_per_head(sinks, DEVICE),
            is_bottom_right, rng_state);
}

}  // namespace

template <c10::DeviceType DEVICE>
at::Tensor attention_autocast(FLASH_MPS_PARAMETERS) {
  return call_in_autocast_dtype<DEVICE, at::Tensor>("flash_mps::attention", FLASH_MPS_ARGUMENTS);
}

template <c10::DeviceType DEVICE>
TensorPair attention_with_lse_autocast(FLASH_MPS_PARAMETERS) {
  return call_in_autocast_dtype<DEVICE, TensorPair>("flash_mps::attention_with_lse",
                                                    FLASH_MPS_ARGUMENTS);
}

template <c10::DeviceType DEVICE>
at::Tensor attention_varlen_autocast(FLASH_MPS_VARLEN_PARAMETERS(c10::SymInt)) {
  return call_varlen_in_autocast_dtype<DEVICE, at::Tensor>("flash_mps::attention_varlen",
                                                           FLASH_MPS_VARLEN_ARGUMENTS);
}

template <c10::DeviceType DEVICE>
TensorPair attention_varlen_with_lse_autocast(FLASH_MPS_VARLEN_PARAMETERS(c10::SymInt)) {
  return call_varlen_in_autocast_dtype<DEVICE, TensorPair>("flash_mps::attention_varlen_with_lse",
                                                           FLASH_MPS_VARLEN_ARGUMENTS);
}

template at::Tensor attention_autocast<at::kMPS>(FLASH_MPS_PARAMETERS);
template at::Tensor attention_autocast<at::kCPU>(FLASH_MPS_PARAMETERS);
template TensorPair attention_with_lse_autocast<at::kMPS>(FLASH_MPS_PARAMETERS);
template TensorPair attention_with_lse_autocast<at::kCPU>(FLASH_MPS_PARAMETERS);
template at::Tensor attention_varlen_autocast<at::kMPS>(FLASH_MPS_VARLEN_PARAMETERS(c10::SymInt));
template at::Tensor attention_varlen_autocast<at::kCPU>(FLASH_MPS_VARLEN_PARAMETERS(c10::SymInt));
template TensorPair attention_varlen_with_lse_autocast<at::kMPS>(
    FLASH_MPS_VARLEN_PARAMETERS(c10::SymInt));
template TensorPair attention_varlen_with_lse_autocast<at::kCPU>(
    FLASH_MPS_VARLEN_PARAMETERS(c10::SymInt));

}  // namespace flash_mps
