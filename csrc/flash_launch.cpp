#include "flash_launch.h"

#include <algorithm>
#include <cstdlib>

namespace flash_mps {

namespace {

// macOS kills a dispatch that keeps the display waiting for seconds. 4e11 floating-point operations
// are 0.15 s at the 2.6 TFLOPS of the smallest GPU (M1, 8 cores).
double max_work_per_dispatch() {
  static const double limit = [] {
    const char* text = std::getenv("TORCH_FLASH_MPS_MAX_DISPATCH_FLOP");
    const double chosen = text != nullptr ? std::strtod(text, nullptr) : 0.0;
    return chosen > 0.0 ? chosen : 4e11;
  }();
  return limit;
}

int64_t num_blocks_of(const AttnProblem& problem, int64_t rows, int64_t size) {
  return problem.packed.has_value() ? rows / size + problem.packed->count + 2
                                    : ceil_div(rows, size);
}

}  // namespace

Device& require_device(const char* op) {
  Device* gpu = device();
  TORCH_CHECK(gpu != nullptr, "flash_mps::", op, ": expected a Metal device, got none");
  return *gpu;
}

const Pipeline* require_pipeline(const char* op, const KernelKey& key) {
  const auto [pipeline, error] =
      require_device(op).pipeline(key.cache_key(), [&] { return key.source(); });
  TORCH_CHECK(pipeline != nullptr, "flash_mps::", op, ": ", error);
  return pipeline;
}

void encode(const char* op, std::span<const Launch> launches) {
  const std::string error = require_device(op).launch(launches);
  TORCH_CHECK(error.empty(), "flash_mps::", op, ": ", error);
}

Binding bind(const at::Tensor& tensor, uint32_t slot) {
  return {
      .buffer = tensor.storage().data(),
      .byte_offset = static_cast<uint64_t>(tensor.storage_offset() * tensor.element_size()),
      .slot = slot,
  };
}

uint32_t score_constants(const AttnProblem& problem) {
  return constant_bit(kHasSoftcapConstant, problem.softcap != 0.0) |
         constant_bit(kHasAlibiConstant, problem.alibi_slopes.defined()) |
         constant_bit(kHasDropoutConstant, problem.dropout_p != 0.0) |
         constant_bit(kHasBlockClassesConstant, problem.block_classes.defined()) |
         constant_bit(kIsPackedConstant, problem.packed.has_value()) |
         constant_bit(kHasUserCodeConstant, problem.user.number != 0);
}

void bind_score_buffers(std::vector<Binding>& bindings, const AttnProblem& problem) {
  if (problem.mask.defined()) bindings.push_back(bind(problem.mask, kMaskBuffer));
  if (problem.block_classes.defined()) {
    bindings.push_back(bind(problem.block_classes, kBlockClassesBuffer));
  }
  if (problem.alibi_slopes.defined()) {
    bindings.push_back(bind(problem.alibi_slopes, kAlibiBuffer));
  }
  if (problem.packed.has_value()) {
    bindings.push_back(bind(problem.packed->cu_seqlens_q, kCuSeqlensQBuffer));
    bindings.push_back(bind(problem.packed->cu_seqlens_k, kCuSeqlensKBuffer));
  }
  uint32_t slot = kUserTensorBuffer;
  for (const at::Tensor& tensor : problem.user.captured) bindings.push_back(bind(tensor, slot++));
}

int64_t num_query_blocks(const AttnProblem& problem, int64_t size) {
  return num_blocks_of(problem, problem.seqlen_q, size);
}

int64_t num_key_blocks(const AttnProblem& problem, int64_t size) {
  return num_blocks_of(problem, problem.seqlen_k, size);
}

void add_user_layout(Launch& launch, const AttnProblem& problem) {
  launch.numbers = problem.user.layout;
  launch.numbers_slot = kUserLayoutBuffer;
}

int64_t blocks_per_dispatch(int64_t num_blocks, double work) {
  const double dispatches = std::max(1.0, work / max_work_per_dispatch());
  return std::max<int64_t>(1, static_cast<int64_t>(static_cast<double>(num_blocks) / dispatches));
}

}  // namespace flash_mps
