#include "flash_bwd.h"

#include <ATen/ExpandUtils.h>
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <vector>

#include "../metal/instances.h"
#include "block_classes.h"
#include "flash_fwd.h"
#include "flash_launch.h"
#include "visibility.h"

namespace flash_mps {

namespace {

constexpr uint32_t kRowsPerDeltaThreadgroup = 4;

// [leading dimensions of the caller ..., S(, D)] -> [B, Hq, S(, D)]
at::Tensor to_heads(const AttnProblem& problem, const at::Tensor& tensor) {
  if (!problem.has_own_rank) return tensor;
  std::vector<int64_t> sizes = {problem.batch, problem.num_heads_q};
  const auto rest = tensor.sizes().slice(problem.leading_shape.size());
  sizes.insert(sizes.end(), rest.begin(), rest.end());
  return tensor.reshape(sizes);
}

// Everything that the launches of one backward call share.
struct Backward {
  const char* op;
  const AttnProblem& problem;
  GpuFamily family;
  at::Tensor out, lse, dout, dlse, delta;   // [B, Hq, Sq(, Dv)]; dlse undefined: zero
  at::Tensor dquery, dkey, dvalue, dmask;   // [B, H, S, D], undefined where not asked for
  AttnBwdParams params;
};

AttnBwdParams make_bwd_params(const Backward& bwd) {
  const AttnProblem& problem = bwd.problem;
  AttnBwdParams params{};
  params.fwd = make_params(problem, bwd.out);
  const auto set = [](const at::Tensor& tensor, int64_t& b, int64_t& h, int64_t& s) {
    if (!tensor.defined()) return;
    b = stride_or_broadcast(tensor, 0);
    h = tensor.stride(1);
    s = tensor.stride(2);
  };
  set(bwd.dout, params.dout_stride_b, params.dout_stride_h, params.dout_stride_s);
  params.dout_stride_d = bwd.dout.stride(3);
  set(bwd.dquery, params.dq_stride_b, params.dq_stride_h, params.dq_stride_s);
  set(bwd.dkey, params.dk_stride_b, params.dk_stride_h, params.dk_stride_s);
  set(bwd.dvalue, params.dv_stride_b, params.dv_stride_h, params.dv_stride_s);
  if (bwd.dmask.defined()) {
    params.dmask_stride_b = stride_or_broadcast(bwd.dmask, 0);
    params.dmask_stride_h = stride_or_broadcast(bwd.dmask, 1);
    params.dmask_stride_q = stride_or_broadcast(bwd.dmask, 2);
  }
  params.batch = static_cast<int32_t>(problem.batch);
  params.q_is_wide = has_wide_rows(problem.query);
  params.dout_is_wide = has_wide_rows(bwd.dout);
  return params;
}

KernelKey make_key(const Backward& bwd, Op op) {
  const AttnProblem& problem = bwd.problem;
  const auto head_dim = static_cast<int>(problem.head_dim);
  const auto head_dim_v = static_cast<int>(problem.head_dim_v);
  return {
      .op = op,
      .type = problem.type,
      .head_dim = instance_head_dim(head_dim),
      .head_dim_v = instance_head_dim(head_dim_v),
      .mask_kind = problem.mask_kind,
      .constants = score_constants(problem),
      .user_code = problem.user.number,
      .tiling = choose(op, bwd.family, element_bytes(problem.type), head_dim, head_dim_v),
  };
}

std::vector<Binding> operands(const Backward& bwd) {
  const AttnProblem& problem = bwd.problem;
  std::vector<Binding> bindings = {
      bind(problem.query, kQueryBuffer), bind(problem.key, kKeyBuffer),
      bind(problem.value, kValueBuffer), bind(bwd.dout, kDOutBuffer),
      bind(bwd.lse, kLseBuffer),         bind(bwd.delta, kDeltaBuffer),
  };
  bind_score_buffers(bindings, problem);
  return bindings;
}

// Floating-point operations of `products` matrix products over the visible pairs.
double work(const AttnProblem& problem, double products) {
  const auto pairs = static_cast<double>(visible_pairs(problem, 0, problem.seqlen_q));
  const auto width = static_cast<double>(std::max(problem.head_dim, problem.head_dim_v));
  return 2.0 * products * pairs * width * static_cast<double>(problem.batch * problem.num_heads_q);
}

Launch make_launch(const Pipeline* pipeline, const std::vector<Binding>& bindings,
                   const AttnBwdParams& params, Size3 grid, uint32_t threads) {
  return {
      .pipeline = pipeline,
      .bindings = bindings,
      .params = &params,
      .params_bytes = sizeof(AttnBwdParams),
      .params_slot = kParamsBuffer,
      .grid = grid,
      .threads = threads,
      .reads_earlier_launches = true,
  };
}

void launch_delta(const Backward& bwd) {
  const AttnProblem& problem = bwd.problem;
  const KernelKey key{.op = Op::FlashBwdDelta,
                      .type = problem.type,
                      .constants = constant_bit(kHasLseConstant, bwd.dlse.defined())};
  std::vector<Binding> bindings = {bind(bwd.out, kOutBuffer), bind(bwd.dout, kDOutBuffer),
                                   bind(bwd.delta, kDeltaBuffer)};
  if (bwd.dlse.defined()) bindings.push_back(bind(bwd.dlse, kDLseBuffer));
  const Size3 grid = {static_cast<uint32_t>(ceil_div(problem.seqlen_q, kRowsPerDeltaThreadgroup)),
                      static_cast<uint32_t>(problem.num_heads_q),
                      static_cast<uint32_t>(problem.batch)};
  const Launch one = make_launch(require_pipeline(bwd.op, key), bindings, bwd.params, grid,
                                 kRowsPerDeltaThreadgroup * kSimdWidth);
  encode(bwd.op, {&one, 1});
}

// Launches a kernel whose threadgroups own blocks of one dimension, split over several dispatches where
// the work is long. It makes S and dP once per head block, and `sums` products of them.
// `set_first` stores the first block of a dispatch in its params.
template <typename SetFirst>
void launch_blocks(const Backward& bwd, const KernelKey& key, const std::vector<Binding>& bindings,
                   int64_t num_blocks, int64_t num_heads, double sums, SetFirst set_first) {
  const Pipeline* pipeline = require_pipeline(bwd.op, key);
  const int num_head_blocks = head_blocks(key.op, key.head_dim, key.head_dim_v).count;
  const double products = 2.0 * num_head_blocks + sums;
  const int64_t per_dispatch = blocks_per_dispatch(num_blocks, work(bwd.problem, products));
  std::vector<AttnBwdParams> params(ceil_div(num_blocks, per_dispatch), bwd.params);
  std::vector<Launch> launches;
  for (int64_t first = 0; first < num_blocks; first += per_dispatch) {
    AttnBwdParams& own = params[launches.size()];
    set_first(own, static_cast<int32_t>(first));
    const auto count = static_cast<uint32_t>(std::min(per_dispatch, num_blocks - first));
    const Size3 grid = {count * static_cast<uint32_t>(num_head_blocks),
                        static_cast<uint32_t>(num_heads), static_cast<uint32_t>(bwd.problem.batch)};
    const auto threads = static_cast<uint32_t>(key.tiling->num_simdgroups) * kSimdWidth;
    launches.push_back(make_launch(pipeline, bindings, own, grid, threads));
    add_user_layout(launches.back(), bwd.problem);
  }
  encode(bwd.op, launches);
}

void launch_dq(const Backward& bwd) {
  const KernelKey key = make_key(bwd, Op::FlashBwdDq);
  std::vector<Binding> bindings = operands(bwd);
  bindings.push_back(bind(bwd.dquery, kDQueryBuffer));
  launch_blocks(bwd, key, bindings, num_query_blocks(bwd.problem, key.tiling->block_q),
                bwd.problem.num_heads_q, /*sums=*/1.0,
                [](AttnBwdParams& own, int32_t first) { own.fwd.first_q_block = first; });
}

void launch_dkv(const Backward& bwd) {
  const KernelKey key = make_key(bwd, Op::FlashBwdDkv);
  std::vector<Binding> bindings = operands(bwd);
  bindings.push_back(bind(bwd.dkey, kDKeyBuffer));
  bindings.push_back(bind(bwd.dvalue, kDValueBuffer));
  launch_blocks(bwd, key, bindings, num_key_blocks(bwd.problem, key.tiling->block_k),
                bwd.problem.num_heads_kv, /*sums=*/2.0,
                [](AttnBwdParams& own, int32_t first) { own.first_k_block = first; });
}

// What the sinks have of delta, with the weight of a key that each of them is: float32 [B, Hq, Sq].
at::Tensor sink_shares(const AttnProblem& problem, const at::Tensor& lse, const at::Tensor& delta) {
  const at::Tensor sinks = problem.sinks.unsqueeze(1);
  // A sink of -inf has no weight, nor has one of a row that belongs to no packed sequence.
  const at::Tensor has_no_weight = sinks.isneginf().logical_or(lse.isneginf());
  return (at::exp(sinks - lse) * delta).masked_fill(has_no_weight, 0.0);
}

// The gradient of sinks that are all that their rows see: lse is the sink itself.
at::Tensor sinks_gradient_without_keys(const AttnProblem& problem, const at::Tensor& lse,
                                       const at::Tensor& grad_lse) {
  const at::Tensor delta =
      grad_lse.defined() ? -to_heads(problem, grad_lse) : at::zeros({}, problem.sinks.options());
  return sinks_gradient(problem, to_heads(problem, lse), delta);
}

// A bias that is the same for every key shifts all scores of a row alike: nothing but lse feels it.
void sum_dlse(const Backward& bwd) {
  at::Tensor sum =
      bwd.dlse.defined() ? bwd.dlse.masked_fill(bwd.lse.isinf(), 0.0) : at::zeros_like(bwd.lse);
  if (bwd.problem.sinks.defined()) sum = sum + sink_shares(bwd.problem, bwd.lse, bwd.delta);
  bwd.dmask.copy_(at::sum_to(sum.unsqueeze(-1), bwd.dmask.sizes()));
}

void launch_dmask(const Backward& bwd) {
  const at::Tensor& dmask = bwd.dmask;
  std::vector<Binding> bindings = operands(bwd);
  bindings.push_back(bind(dmask, kDMaskBuffer));
  const AttnBwdParams params = bwd.params;
  const Size3 grid = {static_cast<uint32_t>(ceil_div(dmask.size(3), FLASH_BWD_DMASK_BLOCK_K)),
                      static_cast<uint32_t>(ceil_div(dmask.size(2), 8)),
                      static_cast<uint32_t>(dmask.size(0) * dmask.size(1))};
  const Launch one = make_launch(require_pipeline(bwd.op, make_key(bwd, Op::FlashBwdDmask)),
                                 bindings, params, grid, kSimdWidth);
  encode(bwd.op, {&one, 1});
}

bool is_broadcast(const AttnProblem& problem, const at::Tensor& operand) {
  return operand.size(0) != problem.batch;
}

// Of a problem with a head dimension of size 0, whose gradients are as empty.
AttnGradients flash_bwd_of_empty_head_dims(const char* op, const AttnProblem& problem,
                                           const at::Tensor& out, const at::Tensor& lse,
                                           const at::Tensor& grad_out, const at::Tensor& grad_lse,
                                           WantedGradients wanted) {
  const auto pad = [&](const at::Tensor& tensor) {
    return problem.head_dim_v == 0 ? at::constant_pad_nd(tensor, {0, 1}) : tensor;
  };
  AttnGradients padded = flash_bwd(op, without_empty_head_dims(problem), pad(out), lse,
                                   pad(grad_out), grad_lse, wanted);
  const auto trim = [](at::Tensor& gradient, int64_t width) {
    if (gradient.defined()) gradient = gradient.narrow(3, 0, width);
  };
  trim(padded.query, problem.head_dim);
  trim(padded.key, problem.head_dim);
  trim(padded.value, problem.head_dim_v);
  return padded;
}

// A gradient that is summed over the batch is to be rounded once, after the sum: in 16 bits, everything
// is computed in float32.
AttnGradients flash_bwd_in_float32(const char* op, const AttnProblem& problem,
                                   const at::Tensor& out, const at::Tensor& lse,
                                   const at::Tensor& grad_out, const at::Tensor& grad_lse,
                                   WantedGradients wanted) {
  AttnProblem wide = problem;
  for (at::Tensor* operand : {&wide.query, &wide.key, &wide.value}) {
    *operand = operand->to(at::kFloat);
  }
  if (problem.mask_kind == kSameMask) {
    wide.mask = problem.mask.to(at::kFloat);
    wide.mask_kind = kFloatMask;
  }
  wide.type = ElementType::Float32;
  AttnGradients gradients =
      flash_bwd(op, wide, out.to(at::kFloat), lse, grad_out.to(at::kFloat), grad_lse, wanted);
  const auto narrow = [](at::Tensor& gradient, const at::Tensor& operand) {
    if (!gradient.defined()) return;
    gradient = at::sum_to(gradient, operand.sizes()).to(operand.scalar_type());
  };
  narrow(gradients.query, problem.query);
  narrow(gradients.key, problem.key);
  narrow(gradients.value, problem.value);
  narrow(gradients.mask, problem.mask);
  return gradients;
}

}  // namespace

at::Tensor sinks_gradient(const AttnProblem& problem, const at::Tensor& lse,
                          const at::Tensor& delta) {
  return -sink_shares(problem, lse, delta).sum({0, 2});
}

AttnGradients flash_bwd(const char* op, const AttnProblem& given, const at::Tensor& out,
                        const at::Tensor& lse, const at::Tensor& grad_out,
                        const at::Tensor& grad_lse, WantedGradients wanted) {
  const AttnProblem problem = with_block_classes(given, /*is_decode=*/false);
  if (problem.head_dim == 0 || problem.head_dim_v == 0) {
    return flash_bwd_of_empty_head_dims(op, problem, out, lse, grad_out, grad_lse, wanted);
  }
  const bool sums_over_batch = is_broadcast(problem, problem.query) ||
                               is_broadcast(problem, problem.key) ||
                               is_broadcast(problem, problem.value);
  if (problem.type != ElementType::Float32 && sums_over_batch) {
    return flash_bwd_in_float32(op, problem, out, lse, grad_out, grad_lse, wanted);
  }
  const GpuFamily family = tuned_family(require_device(op).gpu_family());
  const auto reason = flash_fwd_unsupported(problem, family);
  TORCH_CHECK(!reason.has_value(), "flash_mps::", op, ": ", *reason);
  Backward bwd{.op = op, .problem = problem, .family = family};
  const auto gradient_of = [&](const at::Tensor& operand) {
    return empty_gradient(problem, operand.expand({problem.batch, -1, -1, -1}));
  };
  if (wanted.query) bwd.dquery = gradient_of(problem.query);
  if (wanted.key || wanted.value) {
    bwd.dkey = gradient_of(problem.key);
    bwd.dvalue = gradient_of(problem.value);
  }
  if (wanted.mask) bwd.dmask = at::empty(problem.mask.sizes(), problem.mask.options());
  at::Tensor dsinks;
  const int64_t rows = problem.total_rows();
  if (rows == 0 || problem.seqlen_k == 0) {
    if (wanted.sinks) dsinks = sinks_gradient_without_keys(problem, lse, grad_lse);
    for (at::Tensor* gradient : {&bwd.dquery, &bwd.dkey, &bwd.dvalue, &bwd.dmask}) {
      if (gradient->defined()) gradient->zero_();
    }
  } else {
    bwd.out = dense_rows(to_heads(problem, out));
    bwd.lse = to_heads(problem, lse).contiguous();
    bwd.dout = dense_rows(to_heads(problem, grad_out));
    if (grad_lse.defined()) bwd.dlse = to_heads(problem, grad_lse).contiguous();
    bwd.delta = empty_lse(problem);
    bwd.params = make_bwd_params(bwd);
    launch_delta(bwd);
    if (wanted.query) launch_dq(bwd);
    if (bwd.dkey.defined()) launch_dkv(bwd);
    if (wanted.sinks) dsinks = sinks_gradient(problem, bwd.lse, bwd.delta);
    if (wanted.mask && bwd.dmask.size(3) == 1) {
      sum_dlse(bwd);
    } else if (wanted.mask) {
      launch_dmask(bwd);
    }
  }
  return {
      .query = bwd.dquery,
      .key = wanted.key ? bwd.dkey : at::Tensor(),
      .value = wanted.value ? bwd.dvalue : at::Tensor(),
      .mask = bwd.dmask,
      .sinks = dsinks,
  };
}

}  // namespace flash_mps
