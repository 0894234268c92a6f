#include "flash_decode.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <vector>

#include "block_classes.h"
#include "flash_launch.h"
#include "score_args.h"
#include "visibility.h"

namespace flash_mps {

namespace {

constexpr int64_t kMaxDecodeQueries = 16;

double work(const AttnProblem& problem) {
  return 2.0 * static_cast<double>(problem.total_rows()) * static_cast<double>(problem.seqlen_k) *
         static_cast<double>(problem.head_dim + problem.head_dim_v);
}

// Keys that at least one query sees, by position; of a cache, when its sequences are full.
int64_t keys_in_band(const AttnProblem& problem) {
  const KeyBand band = key_band(problem);
  const int64_t begin = std::clamp<int64_t>(band.begin, 0, problem.seqlen_k);
  return std::clamp(band.end + problem.seqlen_q - 1, begin, problem.seqlen_k) - begin;
}

const Tiling* choose_tiling(const AttnProblem& problem) {
  const auto limit = int64_t{std::numeric_limits<int>::max()};
  if (problem.head_dim > limit || problem.head_dim_v > limit) return nullptr;
  return choose_decode(static_cast<int>(problem.key.element_size()),
                       static_cast<int>(problem.head_dim), static_cast<int>(problem.head_dim_v),
                       problem.group_size() * problem.seqlen_q);
}

// Strides of what lies in the cache beside keys and values.
void add_cache(AttnDecodeParams& params, const CachedAttention& cached) {
  const KvCache& cache = cached.cache;
  params.num_entries = static_cast<int32_t>(cache.num_entries());
  params.seqlen_new = static_cast<int32_t>(cached.seqlen_new);
  params.has_seqlens = cache.seqlens.has_value();
  params.has_leftpad = cache.leftpad.has_value();
  params.has_batch_idx = cache.cache_batch_idx.has_value();
  if (cache.k_scale.has_value()) {
    params.k_scale_stride_b = stride_or_broadcast(*cache.k_scale, 0);
    params.k_scale_stride_h = stride_or_broadcast(*cache.k_scale, 1);
    params.k_scale_stride_s = stride_or_broadcast(*cache.k_scale, 2);
    params.v_scale_stride_b = stride_or_broadcast(*cache.v_scale, 0);
    params.v_scale_stride_h = stride_or_broadcast(*cache.v_scale, 1);
    params.v_scale_stride_s = stride_or_broadcast(*cache.v_scale, 2);
  }
  if (cache.block_table.has_value()) {
    params.block_table_stride_b = stride_or_broadcast(*cache.block_table, 0);
  }
}

AttnDecodeParams make_decode_params(const AttnProblem& problem, const CachedAttention* cached,
                                    const FlashDecodePlan& plan, const at::Tensor& out) {
  // No query is farther from a key of its sequence.
  const int64_t farthest = problem.seqlen_q + problem.seqlen_k;
  AttnDecodeParams params{
      .fwd = make_params(problem, out),
      .total_rows = problem.total_rows(),
      .num_rows = static_cast<int32_t>(plan.num_rows),
      .row_tiles = static_cast<int32_t>(plan.row_tiles),
      .num_splits = static_cast<int32_t>(plan.num_splits),
      .num_entries = static_cast<int32_t>(problem.batch),
      .page_size = static_cast<int32_t>(problem.key.size(2)),
      .is_causal = problem.is_causal,
      .window_left = static_cast<int32_t>(std::min(problem.window_left, farthest)),
      .window_right = static_cast<int32_t>(std::min(problem.window_right, farthest)),
  };
  const int64_t rows_per_block = plan.row_tiles * plan.key.tiling->block_q;
  const bool has_own_heads = params.fwd.mask_stride_h != 0 && problem.group_size() > 1;
  // A block that holds part of a group tells its rows apart by their query too.
  const bool has_own_queries =
      params.fwd.mask_stride_q != 0 || (has_own_heads && problem.group_size() > rows_per_block);
  const int64_t mask_heads = has_own_heads ? problem.group_size() : 1;
  params.mask_row_h = has_own_heads;
  params.mask_row_q = has_own_queries ? static_cast<int32_t>(mask_heads) : 0;
  if (cached != nullptr) add_cache(params, *cached);
  return params;
}

std::vector<Binding> make_bindings(const AttnProblem& problem, const CachedAttention* cached,
                                   const FlashDecodePlan& plan, const at::Tensor& out,
                                   const at::Tensor& lse, const at::Tensor& partial) {
  std::vector<Binding> bindings;
  bindings.reserve(12);
  bindings.push_back(bind(problem.query, kQueryBuffer));
  bindings.push_back(bind(problem.key, kKeyBuffer));
  bindings.push_back(bind(problem.value, kValueBuffer));
  if (partial.defined()) {
    bindings.push_back(bind(partial, kPartialBuffer));
  } else {
    bindings.push_back(bind(out, kOutBuffer));
    if (lse.defined()) bindings.push_back(bind(lse, kLseBuffer));
    if (problem.sinks.defined()) bindings.push_back(bind(problem.sinks, kSinksBuffer));
  }
  bind_score_buffers(bindings, problem);
  if (plan.key.has(kIsQuantizedConstant)) {
    bindings.push_back(bind(*cached->cache.k_scale, kKeyScaleBuffer));
    bindings.push_back(bind(*cached->cache.v_scale, kValueScaleBuffer));
  }
  if (plan.key.has(kIsCachedConstant)) {
    // A kernel's buffers are all bound, also one that its params tell it not to read: to the start of
    // query's, which any type is aligned to.
    const auto bind_or_query = [&](const OptionalTensor& tensor, uint32_t slot) {
      Binding binding = bind(tensor.value_or(problem.query), slot);
      if (!tensor.has_value()) binding.byte_offset = 0;
      bindings.push_back(binding);
    };
    bind_or_query(cached->cache.seqlens, kSeqlensBuffer);
    bind_or_query(cached->cache.leftpad, kLeftpadBuffer);
    bind_or_query(cached->cache.cache_batch_idx, kBatchIdxBuffer);
  }
  if (plan.key.has(kIsPagedConstant)) {
    bindings.push_back(bind(*cached->cache.block_table, kBlockTableBuffer));
  }
  return bindings;
}

AttnCombineParams make_combine_params(const AttnProblem& problem, const FlashDecodePlan& plan,
                                      const at::Tensor& out) {
  return {
      .out_stride_b = out.stride(0),
      .out_stride_h = out.stride(1),
      .out_stride_s = out.stride(2),
      .num_heads_q = static_cast<int32_t>(problem.num_heads_q),
      .seqlen_q = static_cast<int32_t>(problem.seqlen_q),
      .head_dim_v = static_cast<int32_t>(problem.head_dim_v),
      .num_splits = static_cast<int32_t>(plan.num_splits),
      .num_rows = static_cast<int32_t>(problem.total_rows()),
  };
}

KernelKey combine_key(const AttnProblem& problem, bool has_lse) {
  return {.op = Op::FlashDecodeCombine,
          .type = problem.type,
          .constants = constant_bit(kHasLseConstant, has_lse) |
                       constant_bit(kHasSinksConstant, problem.sinks.defined())};
}

std::vector<Binding> make_combine_bindings(const AttnProblem& problem, const at::Tensor& out,
                                           const at::Tensor& lse, const at::Tensor& partial) {
  std::vector<Binding> bindings = {bind(out, kOutBuffer), bind(partial, kPartialBuffer)};
  if (lse.defined()) bindings.push_back(bind(lse, kLseBuffer));
  if (problem.sinks.defined()) bindings.push_back(bind(problem.sinks, kSinksBuffer));
  return bindings;
}

}  // namespace

bool runs_decode(const AttnProblem& problem) {
  return problem.seqlen_q <= kMaxDecodeQueries && !problem.wants_gradient &&
         problem.dropout_p == 0.0 && !problem.packed.has_value();
}

double unconditional_key_bytes(const AttnProblem& problem) {
  const Tiling* tiling = choose_tiling(problem);
  if (tiling == nullptr || tiling->path == OperandPath::Direct) return 0.0;
  const int64_t row_blocks = ceil_div(problem.group_size() * problem.seqlen_q, tiling->max_rows());
  return static_cast<double>(row_blocks * problem.batch * problem.num_heads_kv) *
         static_cast<double>(keys_in_band(problem) * (problem.head_dim + problem.head_dim_v)) *
         static_cast<double>(problem.key.element_size());
}

std::optional<std::string> flash_decode_unsupported(const AttnProblem& problem) {
  if (choose_tiling(problem) != nullptr) return std::nullopt;
  return c10::str("expected head_dim and head_dim_v of at most ", max_head_dim(Op::FlashDecode),
                  " for up to ", kMaxDecodeQueries, " queries, got ", problem.head_dim, " and ",
                  problem.head_dim_v);
}

FlashDecodePlan plan_flash_decode(const AttnProblem& problem, const CachedAttention* cached,
                                  GpuFamily family, int gpu_cores, bool has_lse) {
  const Tiling* tiling = choose_tiling(problem);
  FlashDecodePlan plan{};
  plan.num_rows = problem.group_size() * problem.seqlen_q;
  const int64_t most = tiling->max_rows() / tiling->block_q;
  const int64_t tiles = ceil_div(plan.num_rows, tiling->block_q);
  plan.row_tiles =
      std::min(most, static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(tiles))));
  plan.num_row_blocks = ceil_div(plan.num_rows, plan.row_tiles * tiling->block_q);
  plan.row_blocks_per_dispatch = blocks_per_dispatch(plan.num_row_blocks, work(problem));
  plan.num_splits = cached != nullptr && cached->num_splits > 0
                        ? cached->num_splits
                        : num_splits(problem.batch * plan.num_row_blocks, problem.num_heads_kv,
                                     keys_in_band(problem), family, gpu_cores);
  const bool is_split = plan.num_splits > 1;
  plan.key = {
      .op = Op::FlashDecode,
      .type = problem.type,
      .head_dim = instance_head_dim(problem.head_dim),
      .head_dim_v = instance_head_dim(problem.head_dim_v),
      .mask_kind = problem.mask_kind,
      .constants =
          score_constants(problem) | constant_bit(kHasLseConstant, has_lse && !is_split) |
          constant_bit(kHasSinksConstant, problem.sinks.defined() && !is_split) |
          constant_bit(kIsSplitConstant, is_split) |
          constant_bit(kIsCachedConstant, cached != nullptr && cached->cache.is_indexed()) |
          constant_bit(kIsPagedConstant,
                       cached != nullptr && cached->cache.block_table.has_value()) |
          constant_bit(kIsQuantizedConstant, cached != nullptr && cached->cache.is_int8()),
      .user_code = problem.user.number,
      .tiling = tiling,
  };
  return plan;
}

void flash_decode(const char* op, const AttnProblem& problem, const CachedAttention* cached,
                  const at::Tensor& out, const at::Tensor& lse) {
  Device& gpu = require_device(op);
  const auto reason = flash_decode_unsupported(problem);
  TORCH_CHECK(!reason.has_value(), "flash_mps::", op, ": ", *reason);
  const FlashDecodePlan plan = plan_flash_decode(problem, cached, tuned_family(gpu.gpu_family()),
                                                 gpu.gpu_cores(), lse.defined());
  const Pipeline* pipeline = require_pipeline(op, plan.key);
  at::Tensor partial;
  if (plan.num_splits > 1) {
    partial = at::empty({plan.scratch_size(problem)}, problem.query.options().dtype(at::kFloat));
  }
  const std::vector<Binding> bindings = make_bindings(problem, cached, plan, out, lse, partial);
  std::vector<AttnDecodeParams> params(ceil_div(plan.num_row_blocks, plan.row_blocks_per_dispatch),
                                       make_decode_params(problem, cached, plan, out));
  std::vector<Launch> launches;
  launches.reserve(params.size() + 1);
  for (int64_t first = 0; first < plan.num_row_blocks; first += plan.row_blocks_per_dispatch) {
    AttnDecodeParams& own = params[launches.size()];
    own.first_row_block = static_cast<int32_t>(first);
    const int64_t count = std::min(plan.row_blocks_per_dispatch, plan.num_row_blocks - first);
    launches.push_back({
        .pipeline = pipeline,
        .bindings = bindings,
        .params = &own,
        .params_bytes = sizeof(own),
        .params_slot = kParamsBuffer,
        .grid = {static_cast<uint32_t>(count * plan.num_splits),
                 static_cast<uint32_t>(problem.num_heads_kv), static_cast<uint32_t>(problem.batch)},
        .threads = static_cast<uint32_t>(plan.key.tiling->num_simdgroups) * kSimdWidth,
    });
    add_user_layout(launches.back(), problem);
  }
  std::vector<Binding> combine_bindings;
  AttnCombineParams combine_params;
  if (partial.defined()) {
    combine_bindings = make_combine_bindings(problem, out, lse, partial);
    combine_params = make_combine_params(problem, plan, out);
    launches.push_back({
        .pipeline = require_pipeline(op, combine_key(problem, lse.defined())),
        .bindings = combine_bindings,
        .params = &combine_params,
        .params_bytes = sizeof(combine_params),
        .params_slot = kParamsBuffer,
        .grid = {static_cast<uint32_t>(problem.total_rows()), 1, 1},
        .threads = kSimdWidth,
        .reads_earlier_launches = true,
    });
  }
  encode(op, launches);
}

std::tuple<at::Tensor, at::Tensor> flash_decode_cached(const char* op,
                                                       const CachedAttention& cached) {
  const AttnProblem& problem = cached.attention;
  at::Tensor out = empty_out(problem);
  at::Tensor lse = empty_lse(problem);
  if (lse.numel() > 0 && problem.key.numel() == 0) {
    out.zero_();
    fill_empty_lse(problem, lse);
  } else if (lse.numel() > 0) {
    const AttnProblem filled =
        with_block_classes(without_empty_head_dims(problem), /*is_decode=*/true);
    flash_decode(op, filled, &cached, problem.head_dim_v == 0 ? empty_out(filled) : out, lse);
  }
  return {out, lse};
}

}  // namespace flash_mps
