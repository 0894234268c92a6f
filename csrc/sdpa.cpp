#include "sdpa.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <memory>
#include <mutex>
#include <optional>

#include "ops.h"
#include "tiling.h"

namespace flash_mps {

namespace {

using c10::DispatchKey;

constexpr const char* kSdpa = "aten::scaled_dot_product_attention";

#define SDPA_PARAMETERS                                                    \
  const at::Tensor &query, const at::Tensor &key, const at::Tensor &value, \
      const OptionalTensor &attn_mask, double dropout_p, bool is_causal,   \
      std::optional<double> scale, bool enable_gqa

const c10::OperatorHandle& sdpa_op() {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(kSdpa, "");
  return op;
}

using Kernel = std::shared_ptr<const c10::SafeKernelFunction>;

Kernel kernel_at(DispatchKey key) {
  return std::make_shared<const c10::SafeKernelFunction>(
      sdpa_op().getComputedKernelForDispatchKey(key));
}

// Our kernel at one dispatch key and the one that it hides. A call that began before `remove` may still
// ask for the hidden kernel after it.
class Override {
 public:
  template <typename Function>
  void install(DispatchKey key, Kernel previous, Function&& kernel) {
    auto library =
        std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    {
      const std::lock_guard lock(mutex_);
      previous_ = std::move(previous);
    }
    library->impl("scaled_dot_product_attention", std::forward<Function>(kernel));
    library_ = std::move(library);
  }

  void remove() { library_.reset(); }

  Kernel previous() {
    const std::lock_guard lock(mutex_);
    return previous_;
  }

 private:
  std::mutex mutex_;
  Kernel previous_;
  std::unique_ptr<torch::Library> library_;
};

template <DispatchKey kKey>
Override& override_at() {
  static Override instance;
  return instance;
}

// Forward-mode differentiation sees through PyTorch's own attention, but not through our op.
bool has_tangent(const at::Tensor& tensor) {
  return tensor._fw_grad(/*level=*/0).defined();
}

bool broadcasts_to(const c10::SymInt& size, const c10::SymInt& target) {
  return size == 1 || size == target;
}

// [..., S, D] that go together without the head rules, which only rank 4 and above has. Sizes may be
// symbolic, for torch.compile.
bool shapes_fit(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                bool enable_gqa) {
  const int64_t rank = query.dim();
  if (rank < 2 || key.dim() != rank || value.dim() != rank) return false;
  const bool is_grouped = enable_gqa && rank >= 4;
  for (int64_t dim = 0; dim < rank - 2; ++dim) {
    const c10::SymInt num = key.sym_size(dim);
    if (value.sym_size(dim) != num) return false;
    if (is_grouped && dim == rank - 3) {
      if (num < 1 || query.sym_size(dim) % num != 0) return false;
    } else if (query.sym_size(dim) != num) {
      return false;
    }
  }
  const int limit = max_head_dim(Op::FlashFwd);
  const c10::SymInt head_dim = query.sym_size(-1), head_dim_v = value.sym_size(-1);
  return key.sym_size(-1) == head_dim && value.sym_size(-2) == key.sym_size(-2) && head_dim >= 1 &&
         head_dim <= limit && head_dim_v >= 1 && head_dim_v <= limit;
}

bool mask_fits(const at::Tensor& mask, const at::Tensor& query, const at::Tensor& key) {
  const at::ScalarType type = mask.scalar_type();
  if (!mask.is_mps() || (type != at::kBool && type != query.scalar_type())) return false;
  const int64_t rank = query.dim(), missing = rank - mask.dim();
  if (mask.dim() < 2 || missing < 0) return false;
  for (int64_t dim = 0; dim < mask.dim() - 1; ++dim) {
    if (!broadcasts_to(mask.sym_size(dim), query.sym_size(dim + missing))) return false;
  }
  return broadcasts_to(mask.sym_size(-1), key.sym_size(-2));
}

// Whether the op takes what PyTorch's own attention takes. What both refuse is left to PyTorch, whose
// message the caller knows.
bool takes(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
           const OptionalTensor& attn_mask, double dropout_p, bool is_causal, bool enable_gqa) {
  if (!(dropout_p >= 0.0 && dropout_p <= 1.0)) return false;
  const at::ScalarType type = query.scalar_type();
  if (type != at::kFloat && type != at::kHalf && type != at::kBFloat16) return false;
  for (const at::Tensor* tensor : {&query, &key, &value}) {
    const bool is_plain = tensor->is_mps() && tensor->layout() == at::kStrided;
    if (!is_plain || tensor->scalar_type() != type || has_tangent(*tensor)) return false;
  }
  if (!shapes_fit(query, key, value, enable_gqa)) return false;
  if (!attn_mask.has_value()) return true;
  return !is_causal && !has_tangent(*attn_mask) && mask_fits(*attn_mask, query, key);
}

at::Tensor call_op(SDPA_PARAMETERS) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("flash_mps::attention", "")
                             .typed<decltype(attention_autograd)>();
  return op.call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
                 /*window_left=*/-1, /*window_right=*/-1, /*softcap=*/0.0, /*alibi_slopes=*/{},
                 /*sinks=*/{}, /*is_bottom_right=*/false, /*rng_state=*/{}, /*block_classes=*/{});
}

template <DispatchKey kKey>
at::Tensor sdpa(c10::DispatchKeySet keys, SDPA_PARAMETERS) {
  if (takes(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)) {
    return call_op(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa);
  }
  torch::jit::Stack stack;
  torch::jit::push(stack, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa);
  override_at<kKey>().previous()->callBoxed(sdpa_op(), keys, &stack);
  return torch::jit::pop(stack).toTensor();
}

// PyTorch warns where a kernel takes the place of another, which is what was asked for here.
class Silent : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

std::mutex switch_mutex;
bool is_enabled = false;

}  // namespace

void enable_sdpa() {
  const std::lock_guard lock(switch_mutex);
  if (is_enabled) return;
  Silent silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  // Both first: on a Mac a kernel at MPS takes PyTorch's composite kernel away from AutogradMPS.
  Kernel mps = kernel_at(DispatchKey::MPS), autograd = kernel_at(DispatchKey::AutogradMPS);
  override_at<DispatchKey::AutogradMPS>().install(DispatchKey::AutogradMPS, std::move(autograd),
                                                  TORCH_FN(sdpa<DispatchKey::AutogradMPS>));
  override_at<DispatchKey::MPS>().install(DispatchKey::MPS, std::move(mps),
                                          TORCH_FN(sdpa<DispatchKey::MPS>));
  is_enabled = true;
}

void disable_sdpa() {
  const std::lock_guard lock(switch_mutex);
  override_at<DispatchKey::MPS>().remove();
  override_at<DispatchKey::AutogradMPS>().remove();
  is_enabled = false;
}

}  // namespace flash_mps
