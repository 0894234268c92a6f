#include "attn_args.h"

#include <ATen/ExpandUtils.h>
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "mask_args.h"
#include "score_args.h"
#include "visibility.h"

namespace flash_mps {

namespace {

constexpr int64_t kWideBytes = 16;

void check_tensors(const char* op, const at::Tensor& query, const at::Tensor& key,
                   const at::Tensor& value) {
  const at::ScalarType type = query.scalar_type();
  element_type(op, type);
  FLASH_MPS_CHECK(key.scalar_type() == type && value.scalar_type() == type,
                  "query, key and value to have the same dtype", "query.dtype: ", type,
                  ", key.dtype: ", key.scalar_type(), ", value.dtype: ", value.scalar_type());
  FLASH_MPS_CHECK(key.device() == query.device(),
                  c10::str("key on the device of query, ", query.device()), key.device());
  FLASH_MPS_CHECK(value.device() == query.device(),
                  c10::str("value on the device of query, ", query.device()), value.device());
  FLASH_MPS_CHECK(query.dim() >= 2, "query of rank 2 or more ([..., seqlen_q, head_dim])", "shape ",
                  query.sizes());
  FLASH_MPS_CHECK(key.dim() >= 2, "key of rank 2 or more ([..., seqlen_k, head_dim])", "shape ",
                  key.sizes());
  FLASH_MPS_CHECK(value.dim() >= 2, "value of rank 2 or more ([..., seqlen_k, head_dim_v])",
                  "shape ", value.sizes());
}

// [..., S, D] -> [B, H, S, D] after right-aligned broadcasting of the leading dimensions to
// `leading`, whose last entry is left alone: head counts may differ.
at::Tensor to_4d(const at::Tensor& tensor, at::IntArrayRef leading) {
  std::vector<int64_t> sizes(leading.begin(), leading.end());
  const auto own = tensor.sizes().slice(0, tensor.dim() - 2);
  if (leading.size() >= 2) sizes.back() = own.empty() ? 1 : own.back();
  sizes.insert(sizes.end(), {tensor.size(-2), tensor.size(-1)});
  const at::Tensor expanded = tensor.expand(sizes);
  switch (leading.size()) {
    case 0: return expanded.unsqueeze(0).unsqueeze(0);
    case 1: return expanded.unsqueeze(1);
    case 2: return expanded;
    default: return expanded.flatten(0, static_cast<int64_t>(leading.size()) - 2);
  }
}

// The broadcast leading dimensions of query, key and value; the last one is query's head count.
std::vector<int64_t> broadcast_leading(const char* op, const at::Tensor& query,
                                       const at::Tensor& key, const at::Tensor& value) {
  const int64_t rank = std::max({query.dim(), key.dim(), value.dim()}) - 2;
  std::vector<int64_t> leading(rank, 1);
  const int64_t num_batch_dims = rank >= 2 ? rank - 1 : rank;
  for (int64_t i = 0; i < rank; ++i) {
    const auto size = [&](const at::Tensor& tensor) {
      const int64_t dim = i - (rank - (tensor.dim() - 2));
      return dim < 0 ? int64_t{1} : tensor.size(dim);
    };
    if (i >= num_batch_dims) {
      leading[i] = size(query);
      continue;
    }
    for (const int64_t found : {size(query), size(key), size(value)}) {
      if (found != 1) leading[i] = found;
    }
    for (const int64_t found : {size(query), size(key), size(value)}) {
      FLASH_MPS_CHECK(found == 1 || found == leading[i], "query, key and value of equal batch size",
                      "query ", query.sizes(), ", key ", key.sizes(), ", value ", value.sizes());
    }
  }
  return leading;
}

int64_t common_batch(const AttnProblem& problem) {
  for (const at::Tensor* tensor : {&problem.query, &problem.key, &problem.value}) {
    if (tensor->size(0) != 1) return tensor->size(0);
  }
  return 1;
}

// As the caller has it.
std::string shape_of(const AttnProblem& problem, const at::Tensor& tensor) {
  const bool is_packed = problem.packed.has_value();
  return c10::str(is_packed ? tensor.squeeze(0).transpose(0, 1).sizes() : tensor.sizes());
}

void check_shapes(const char* op, const AttnProblem& problem, bool enable_gqa) {
  const auto& [query, key, value] = std::tie(problem.query, problem.key, problem.value);
  FLASH_MPS_CHECK(key.size(3) == problem.head_dim,
                  c10::str("key with the head_dim of query, ", problem.head_dim), "head_dim ",
                  key.size(3), " (key ", shape_of(problem, key), ")");
  FLASH_MPS_CHECK(value.size(2) == problem.seqlen_k,
                  c10::str("value with the seqlen of key, ", problem.seqlen_k), "seqlen ",
                  value.size(2), " (value ", shape_of(problem, value), ")");
  FLASH_MPS_CHECK(value.size(1) == problem.num_heads_kv,
                  c10::str("value with the head count of key, ", problem.num_heads_kv),
                  value.size(1), " (value ", shape_of(problem, value), ")");
  for (const at::Tensor* tensor : {&query, &key, &value}) {
    FLASH_MPS_CHECK(tensor->size(0) == 1 || tensor->size(0) == problem.batch,
                    "query, key and value of equal batch size", "query ", query.sizes(), ", key ",
                    key.sizes(), ", value ", value.sizes());
  }
  if (problem.num_heads_q != problem.num_heads_kv) {
    FLASH_MPS_CHECK(problem.num_heads_kv > 0 && problem.num_heads_q % problem.num_heads_kv == 0,
                    c10::str("a query head count that is a multiple of key's (layout ",
                             problem.packed.has_value() ? "[total, H, D]" : "[B, H, S, D]", ")"),
                    "query ", shape_of(problem, query), ", key ", shape_of(problem, key));
    FLASH_MPS_CHECK(enable_gqa, "enable_gqa=True where query and key differ in head count",
                    "enable_gqa=False with ", problem.num_heads_q, " query heads and ",
                    problem.num_heads_kv, " key heads");
  }
  FLASH_MPS_CHECK(problem.seqlen_q + problem.seqlen_k < std::numeric_limits<int32_t>::max(),
                  "seqlen_q + seqlen_k below 2^31", problem.seqlen_q, " + ", problem.seqlen_k);
}

// An uninitialised 4-D tensor without gaps, in [B, S, H, D] or [B, H, S, D] order.
at::Tensor empty_dense(at::IntArrayRef sizes, bool is_bshd, const at::TensorOptions& options) {
  // As PyTorch does, a dimension without elements counts as 1.
  const auto extent = [&](int dim) { return std::max<int64_t>(sizes[dim], 1); };
  const int64_t strides[] = {
      extent(1) * extent(2) * extent(3),
      is_bshd ? extent(3) : extent(2) * extent(3),
      is_bshd ? extent(1) * extent(3) : extent(3),
      1,
  };
  return at::empty_strided(sizes, strides, options);
}

bool wants_gradient(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                    const AttnOptions& options) {
  const auto needs_one = [](const OptionalTensor& tensor) {
    return tensor.has_value() && tensor->requires_grad();
  };
  const bool is_wanted = query.requires_grad() || key.requires_grad() || value.requires_grad() ||
                         needs_one(options.attn_mask) || needs_one(options.sinks);
  return is_wanted && at::GradMode::is_enabled();
}

}  // namespace

ElementType element_type(const char* op, at::ScalarType type) {
  switch (type) {
    case at::kFloat: return ElementType::Float32;
    case at::kHalf: return ElementType::Float16;
    case at::kBFloat16: return ElementType::BFloat16;
    default: FLASH_MPS_CHECK(false, "query of dtype Float, Half or BFloat16", type);
  }
}

at::Tensor dense_rows(const at::Tensor& tensor) {
  return tensor.size(-1) > 1 && tensor.stride(-1) != 1 ? tensor.contiguous() : tensor;
}

int64_t stride_or_broadcast(const at::Tensor& tensor, int64_t dim) {
  return tensor.size(dim) == 1 ? 0 : tensor.stride(dim);
}

bool has_wide_rows(const at::Tensor& tensor) {
  const auto bytes = static_cast<int64_t>(tensor.element_size());
  int64_t remainder = tensor.storage_offset() * bytes | tensor.size(3) * bytes;
  for (int64_t dim = 0; dim < 3; ++dim) remainder |= stride_or_broadcast(tensor, dim) * bytes;
  return remainder % kWideBytes == 0;
}

AttnProblem check_inputs(const char* op, const at::Tensor& query, const at::Tensor& key,
                         const at::Tensor& value, const AttnOptions& options) {
  check_tensors(op, query, key, value);
  check_options(op, options);
  AttnProblem problem;
  problem.has_own_rank = query.dim() != 4 || key.dim() != 4 || value.dim() != 4;
  if (problem.has_own_rank) {
    problem.leading_shape = broadcast_leading(op, query, key, value);
    problem.query = dense_rows(to_4d(query, problem.leading_shape));
    problem.key = dense_rows(to_4d(key, problem.leading_shape));
    problem.value = dense_rows(to_4d(value, problem.leading_shape));
  } else {
    problem.is_bshd = query.stride(1) < query.stride(2);
    problem.query = dense_rows(query);
    problem.key = dense_rows(key);
    problem.value = dense_rows(value);
  }
  problem.batch = common_batch(problem);
  problem.num_heads_q = problem.query.size(1);
  problem.num_heads_kv = problem.key.size(1);
  problem.seqlen_q = problem.query.size(2);
  problem.seqlen_k = problem.key.size(2);
  problem.head_dim = problem.query.size(3);
  problem.head_dim_v = problem.value.size(3);
  problem.type = element_type(op, query.scalar_type());
  problem.packed = options.packed;
  check_shapes(op, problem, options.enable_gqa);
  take_mask(op, options, problem);
  problem.is_causal = options.is_causal;
  problem.window_left = options.window_left;
  problem.window_right = options.window_right;
  problem.is_bottom_right = options.is_bottom_right;
  if (options.is_bottom_right && !options.packed.has_value()) {
    problem.causal_offset = problem.seqlen_k - problem.seqlen_q;
  }
  take_score_options(op, options, problem);
  take_dropout(op, options, problem);
  // Without a head dimension every score is an empty sum, whatever the scale.
  const double head_dim = static_cast<double>(std::max<int64_t>(problem.head_dim, 1));
  problem.softmax_scale = options.scale.value_or(1.0 / std::sqrt(head_dim));
  problem.wants_gradient = wants_gradient(query, key, value, options);
  return problem;
}

void check_results(const char* op, const AttnProblem& problem, const at::Tensor& out,
                   const at::Tensor& lse, const at::Tensor& grad_out, const at::Tensor& grad_lse) {
  std::vector<int64_t> rows = problem.leading_shape;
  if (!problem.has_own_rank) rows = {problem.batch, problem.num_heads_q};
  rows.push_back(problem.seqlen_q);
  std::vector<int64_t> outputs = rows;
  outputs.push_back(problem.head_dim_v);
  const auto judge = [&](const char* operand, const at::Tensor& tensor, at::IntArrayRef sizes,
                         at::ScalarType type) {
    FLASH_MPS_CHECK(tensor.sizes() == sizes, c10::str(operand, " of shape ", sizes),
                    tensor.sizes());
    FLASH_MPS_CHECK(tensor.scalar_type() == type, c10::str(operand, " of dtype ", type),
                    tensor.scalar_type());
    FLASH_MPS_CHECK(tensor.device() == problem.query.device(),
                    c10::str(operand, " on the device of query, ", problem.query.device()),
                    tensor.device());
  };
  judge("grad_out", grad_out, outputs, problem.query.scalar_type());
  if (grad_lse.defined()) judge("grad_lse", grad_lse, rows, at::kFloat);
  judge("out", out, outputs, problem.query.scalar_type());
  judge("lse", lse, rows, at::kFloat);
}

AttnProblem without_empty_head_dims(const AttnProblem& problem) {
  AttnProblem padded = problem;
  if (problem.head_dim == 0) {
    padded.query = at::constant_pad_nd(problem.query, {0, 1});
    padded.key = at::constant_pad_nd(problem.key, {0, 1});
    padded.head_dim = 1;
  }
  if (problem.head_dim_v == 0) {
    padded.value = at::constant_pad_nd(problem.value, {0, 1});
    padded.head_dim_v = 1;
  }
  return padded;
}

at::Tensor empty_out(const AttnProblem& problem) {
  const int64_t sizes[] = {problem.batch, problem.num_heads_q, problem.seqlen_q,
                           problem.head_dim_v};
  return empty_dense(sizes, problem.is_bshd, problem.query.options());
}

at::Tensor empty_lse(const AttnProblem& problem) {
  const int64_t sizes[] = {problem.batch, problem.num_heads_q, problem.seqlen_q};
  return at::empty(sizes, problem.query.options().dtype(at::kFloat));
}

at::Tensor empty_gradient(const AttnProblem& problem, const at::Tensor& operand) {
  if (!problem.has_own_rank) return empty_rows_like(operand);
  return empty_dense(operand.sizes(), /*is_bshd=*/false, operand.options());
}

at::Tensor empty_rows_like(const at::Tensor& tensor) {
  return empty_dense(tensor.sizes(), tensor.stride(1) < tensor.stride(2), tensor.options());
}

at::Tensor restore_rank(const AttnProblem& problem, const at::Tensor& result) {
  if (!problem.has_own_rank) return result;
  std::vector<int64_t> sizes = problem.leading_shape;
  sizes.insert(sizes.end(), result.sizes().begin() + 2, result.sizes().end());
  return result.view(sizes);
}

at::Tensor restore_operand(const AttnProblem& problem, const at::Tensor& gradient,
                           const at::Tensor& input) {
  if (gradient.sizes() == input.sizes()) return gradient;
  at::Tensor result = gradient;
  const auto leading = at::IntArrayRef(problem.leading_shape);
  if (problem.has_own_rank && leading.size() == 1) result = result.squeeze(1);
  if (leading.size() > 2) result = result.unflatten(0, leading.slice(0, leading.size() - 1));
  return at::sum_to(result, input.sizes());
}

AttnParams make_params(const AttnProblem& problem, const at::Tensor& out) {
  const auto stride = stride_or_broadcast;
  const at::Tensor &q = problem.query, &k = problem.key, &v = problem.value;
  const auto mask_stride = [&](int64_t dim) {
    return problem.mask.defined() ? stride(problem.mask, dim) : 0;
  };
  const auto class_stride = [&](int64_t dim) {
    return problem.block_classes.defined() ? stride(problem.block_classes, dim) : 0;
  };
  const auto [band_begin, band_end] = key_band(problem);
  return {
      .q_stride_b = stride(q, 0),
      .q_stride_h = stride(q, 1),
      .q_stride_s = stride(q, 2),
      .k_stride_b = stride(k, 0),
      .k_stride_h = stride(k, 1),
      .k_stride_s = stride(k, 2),
      .v_stride_b = stride(v, 0),
      .v_stride_h = stride(v, 1),
      .v_stride_s = stride(v, 2),
      .out_stride_b = stride(out, 0),
      .out_stride_h = out.stride(1),
      .out_stride_s = out.stride(2),
      .mask_stride_b = mask_stride(0),
      .mask_stride_h = mask_stride(1),
      .mask_stride_q = mask_stride(2),
      .mask_stride_k = mask_stride(3),
      .alibi_stride_b = problem.alibi_slopes.defined() && problem.alibi_slopes.dim() == 2
                            ? problem.num_heads_q
                            : 0,
      .class_stride_b = class_stride(0),
      .class_stride_h = class_stride(1),
      .class_stride_q = class_stride(2),
      .class_stride_k = class_stride(3),
      .num_heads_q = static_cast<int32_t>(problem.num_heads_q),
      .group_size = static_cast<int32_t>(problem.group_size()),
      .seqlen_q = static_cast<int32_t>(problem.seqlen_q),
      .seqlen_k = static_cast<int32_t>(problem.seqlen_k),
      .head_dim = static_cast<int32_t>(problem.head_dim),
      .head_dim_v = static_cast<int32_t>(problem.head_dim_v),
      .first_q_block = 0,
      .band_begin = static_cast<int32_t>(band_begin),
      .band_end = static_cast<int32_t>(band_end),
      .causal_offset = static_cast<int32_t>(problem.causal_offset),
      .num_sequences = static_cast<int32_t>(problem.num_sequences()),
      .is_bottom_right = problem.is_bottom_right,
      .k_is_wide = has_wide_rows(k),
      .v_is_wide = has_wide_rows(v),
      .softmax_scale = static_cast<float>(problem.softmax_scale),
      .softcap = static_cast<float>(problem.softcap),
      .dropout_threshold = dropout_threshold(problem),
      .dropout_scale = dropout_scale(problem),
      .dropout_key_low = problem.dropout_key[0],
      .dropout_key_high = problem.dropout_key[1],
  };
}

}  // namespace flash_mps
