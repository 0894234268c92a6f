// The ops on packed sequences: query [total_q, Hq, D], key [total_k, Hkv, D], value [total_k, Hkv, Dv],
// cu_seqlens [sequences + 1]; out [total_q, Hq, Dv], lse [Hq, total_q].
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <array>
#include <cstdint>
#include <optional>

#include "attn_args.h"
#include "ops.h"

namespace flash_mps {

using FourTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// In the order of the schemas; Int is int64_t, or c10::SymInt above the devices.
#define FLASH_MPS_VARLEN_OPTION_PARAMETERS(Int)                                              \
  const at::Tensor &cu_seqlens_q, const at::Tensor &cu_seqlens_k, Int max_seqlen_q,          \
      Int max_seqlen_k, double dropout_p, bool is_causal, std::optional<double> scale,       \
      int64_t window_left, int64_t window_right, double softcap,                             \
      const OptionalTensor &alibi_slopes, const OptionalTensor &sinks, bool is_bottom_right, \
      const OptionalTensor &rng_state
// With `state` in place of rng_state.
#define FLASH_MPS_VARLEN_OPTIONS_WITH(state)                                           \
  cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, is_causal, scale, \
      window_left, window_right, softcap, alibi_slopes, sinks, is_bottom_right, state
#define FLASH_MPS_VARLEN_PARAMETERS(Int)                                   \
  const at::Tensor &query, const at::Tensor &key, const at::Tensor &value, \
      FLASH_MPS_VARLEN_OPTION_PARAMETERS(Int)
#define FLASH_MPS_VARLEN_ARGUMENTS_WITH(state) \
  query, key, value, FLASH_MPS_VARLEN_OPTIONS_WITH(state)
#define FLASH_MPS_VARLEN_ARGUMENTS FLASH_MPS_VARLEN_ARGUMENTS_WITH(rng_state)

#define FLASH_MPS_VARLEN_BACKWARD_PARAMETERS(Int)                                      \
  const at::Tensor &grad_out, const OptionalTensor &grad_lse, const at::Tensor &query, \
      const at::Tensor &key, const at::Tensor &value, const at::Tensor &out,           \
      const at::Tensor &lse, FLASH_MPS_VARLEN_OPTION_PARAMETERS(Int),                  \
      std::array<bool, 4> output_mask
#define FLASH_MPS_VARLEN_BACKWARD_ARGUMENTS                                                  \
  grad_out, grad_lse, query, key, value, out, lse, FLASH_MPS_VARLEN_OPTIONS_WITH(rng_state), \
      output_mask

at::Tensor attention_varlen_mps(FLASH_MPS_VARLEN_PARAMETERS(int64_t));
TensorPair attention_varlen_with_lse_mps(FLASH_MPS_VARLEN_PARAMETERS(int64_t));
FourTensors attention_varlen_backward_mps(FLASH_MPS_VARLEN_BACKWARD_PARAMETERS(int64_t));

at::Tensor attention_varlen_cpu(FLASH_MPS_VARLEN_PARAMETERS(int64_t));
TensorPair attention_varlen_with_lse_cpu(FLASH_MPS_VARLEN_PARAMETERS(int64_t));
FourTensors attention_varlen_backward_cpu(FLASH_MPS_VARLEN_BACKWARD_PARAMETERS(int64_t));

at::Tensor attention_varlen_autograd(FLASH_MPS_VARLEN_PARAMETERS(c10::SymInt));
TensorPair attention_varlen_with_lse_autograd(FLASH_MPS_VARLEN_PARAMETERS(c10::SymInt));
FourTensors attention_varlen_backward_autograd(FLASH_MPS_VARLEN_BACKWARD_PARAMETERS(c10::SymInt));

template <c10::DeviceType DEVICE>
at::Tensor attention_varlen_autocast(FLASH_MPS_VARLEN_PARAMETERS(c10::SymInt));
template <c10::DeviceType DEVICE>
TensorPair attention_varlen_with_lse_autocast(FLASH_MPS_VARLEN_PARAMETERS(c10::SymInt));

}  // namespace flash_mps
