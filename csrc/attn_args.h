// Inputs of an attention op -> a checked AttnProblem -> AttnParams. The only place where params are
// filled and where inputs are judged.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "../metal/attn_params.h"
#include "kernel_key.h"

namespace flash_mps {

// "flash_mps::<op>: expected <expected>, got <found>", where `op` names the op
#define FLASH_MPS_CHECK(condition, expected, ...) \
  TORCH_CHECK(condition, "flash_mps::", op, ": expected ", expected, ", got ", __VA_ARGS__)

using OptionalTensor = std::optional<at::Tensor>;

// Sequences behind each other in the rows of one batch entry; sequence i holds the rows cu_seqlens[i] ...
// cu_seqlens[i + 1] - 1. What comes before the first and after the last belongs to none.
struct PackedSequences {
  at::Tensor cu_seqlens_q, cu_seqlens_k;  // int32 [count + 1], dense, on the device of query
  int64_t count;
  int64_t max_seqlen_k;  // estimates the work; no result depends on it
};

// An op's arguments after query, key and value; each named as in its schema.
struct AttnOptions {
  OptionalTensor attn_mask;
  bool enable_gqa = false;
  double dropout_p = 0.0;
  bool is_causal = false;
  std::optional<double> scale;
  int64_t window_left = -1;
  int64_t window_right = -1;
  double softcap = 0.0;
  // The last query stands at the last key, as in flash_attn: causal_offset = seqlen_k - seqlen_q.
  bool is_bottom_right = false;
  OptionalTensor alibi_slopes;
  OptionalTensor sinks;
  OptionalTensor rng_state;  // of dropout: as by draw_rng_state()
  OptionalTensor block_classes;  // of attn_mask: as by mask_block_classes()
  std::optional<PackedSequences> packed;
};

// User-defined scores and masks: the number of their text (user_code.h; 0: none), the tensors that it
// reads, and size and stride of each dimension of these.
struct UserCode {
  uint32_t number = 0;
  std::vector<at::Tensor> captured;
  std::vector<int64_t> layout;
};

// One checked call. Tensors are 4-D views of the inputs ([B, H, S, D]) with a dense last dimension;
// a size of 1 where the problem has more broadcasts.
struct AttnProblem {
  at::Tensor query, key, value;
  at::Tensor mask;  // 4-D, broadcastable to [B, Hq, Sq, Sk]; undefined without one
  at::Tensor
      block_classes;  // of the mask's blocks, 4-D, broadcastable likewise; undefined: not known
  std::vector<int64_t>
      leading_shape;  // the caller's dimensions before S and D, when they are not [B, H]
  bool has_own_rank = false;  //   (then true)
  bool is_bshd = false;  // query lies in memory as [B, S, H, D]; out will too
  int64_t batch, num_heads_q, num_heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v;
  ElementType type;
  MaskKind mask_kind;
  bool is_causal;
  int64_t causal_offset = 0;  // query i stands at key i + causal_offset
  int64_t window_left = -1, window_right = -1;  // keys that it sees before and after; -1: unlimited
  double softmax_scale;
  bool wants_gradient = false;  // of any input, so that a backward call will follow
  double softcap = 0.0;  // 0: off
  double dropout_p = 0.0;
  uint32_t dropout_key[2] = {0, 0};  // of its random numbers
  int64_t dropout_first_entry = 0;  // the number that they have for the first batch entry
  UserCode user;
  at::Tensor alibi_slopes, sinks;  // float32 [Hq] or [B, Hq], and [Hq], dense; undefined without
  std::optional<PackedSequences> packed;  // then batch is 1, and lengths count the rows of all
  bool is_bottom_right = false;  //   and causal_offset is each sequence's own

  int64_t group_size() const { return num_heads_q / std::max<int64_t>(num_heads_kv, 1); }
  int64_t num_sequences() const { return packed.has_value() ? packed->count : batch; }
  // One row is one query of one head.
  int64_t total_rows() const { return batch * num_heads_q * seqlen_q; }
};

// Throws c10::Error "flash_mps::<op>: expected <what>, got <value>" for anything that the op does not
// take.
AttnProblem check_inputs(const char* op, const at::Tensor& query, const at::Tensor& key,
                         const at::Tensor& value, const AttnOptions& options);

// Throws likewise unless `out` and `lse` could be results of the problem, and the others their
// gradients; an undefined grad_lse is zero.
void check_results(const char* op, const AttnProblem& problem, const at::Tensor& out,
                   const at::Tensor& lse, const at::Tensor& grad_out, const at::Tensor& grad_lse);

// The element type of a dtype that query may have; throws for another.
ElementType element_type(const char* op, at::ScalarType type);

// Copies a tensor whose last dimension is not dense, and only that one.
at::Tensor dense_rows(const at::Tensor& tensor);

// The stride of a dimension, 0 where it has one element and may broadcast.
int64_t stride_or_broadcast(const at::Tensor& tensor, int64_t dim);

// Whether every row of a [B, H, S, D] tensor starts on 16 bytes and is a multiple of 16 bytes long.
bool has_wide_rows(const at::Tensor& tensor);

// The problem with one column of zeros in place of each head dimension of size 0: the same scores, from
// tensors that have a buffer.
AttnProblem without_empty_head_dims(const AttnProblem& problem);

// An uninitialised [B, Hq, Sq, Dv] tensor laid out in memory like query: [B, S, H, D] order when
// query has it, [B, H, S, D] otherwise.
at::Tensor empty_out(const AttnProblem& problem);
// Uninitialised float32 [B, Hq, Sq].
at::Tensor empty_lse(const AttnProblem& problem);

// Uninitialised, of the shape and dtype of `operand`, which is a tensor of the problem, and laid out
// in memory like it: [B, S, H, D] order when it has it, [B, H, S, D] otherwise.
at::Tensor empty_gradient(const AttnProblem& problem, const at::Tensor& operand);

// The same for a 4-D tensor of any use.
at::Tensor empty_rows_like(const at::Tensor& tensor);

// [B, Hq, ...] -> [leading dimensions of the caller ..., ...]
at::Tensor restore_rank(const AttnProblem& problem, const at::Tensor& result);

// The gradient of a tensor of the problem, or of one expanded to the problem's batch -> the gradient
// of the caller's `input`: its rank, summed where it was broadcast.
at::Tensor restore_operand(const AttnProblem& problem, const at::Tensor& gradient,
                           const at::Tensor& input);

AttnParams make_params(const AttnProblem& problem, const at::Tensor& out);

}  // namespace flash_mps
