// Every operator that has no kernel of its own on the simulated device runs as PyTorch's CPU operator.
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <torch/library.h>

#include <array>
#include <string_view>

#include "cpu_alias.h"
#include "generator.h"
#include "stream.h"

namespace sim {
namespace {

using torch::jit::Stack;

// Operators that take CPU tensors next to mps ones by contract: indices and lengths.
bool takes_cpu_tensors(const std::string& name) {
  static constexpr std::array<std::string_view, 9> names = {"aten::index",
                                                            "aten::index_put",
                                                            "aten::index_put_",
                                                            "aten::_index_put_impl_",
                                                            "aten::_unsafe_index",
                                                            "aten::_unsafe_index_put",
                                                            "aten::_pack_padded_sequence",
                                                            "aten::_ctc_loss",
                                                            "aten::_ctc_loss_backward"};
  return std::find(names.begin(), names.end(), name) != names.end();
}

class Call {
 public:
  explicit Call(const c10::OperatorHandle& op) : op_(op), schema_(op.schema()) {}

  void run(Stack* stack) {
    const size_t num_arguments = schema_.arguments().size();
    const size_t first = stack->size() - num_arguments;
    wait_for_device();
    for (size_t i = 0; i < num_arguments; ++i) {
      auto& value = (*stack)[first + i];
      value = argument_to_cpu(std::move(value), schema_.arguments()[i]);
    }
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    aliases_.write_back();
    const size_t num_returns = schema_.returns().size();
    for (auto it = stack->end() - num_returns; it != stack->end(); ++it) {
      *it = map_tensors(std::move(*it), [this](const at::Tensor& t) { return result(t); });
    }
  }

 private:
  c10::IValue argument_to_cpu(c10::IValue value, const c10::Argument& argument) {
    if (value.isDevice()) {
      device_is_explicit_ = true;
      is_for_cpu_ = value.toDevice().is_cpu();
      return value.toDevice().is_mps() ? c10::IValue(at::Device(at::kCPU)) : value;
    }
    if (value.isGenerator() || (value.isNone() && argument.name() == "generator")) {
      return cpu_generator_for(value.isNone() ? std::nullopt : std::optional(value.toGenerator()));
    }
    return map_tensors(std::move(value), [&](const at::Tensor& tensor) {
      if (tensor.defined() && tensor.is_mps()) return aliases_.to_cpu(tensor);
      check_placement(tensor, argument);
      return tensor;
    });
  }

  // As on every PyTorch device, a CPU tensor may join only as a number.
  void check_placement(const at::Tensor& tensor, const c10::Argument& argument) const {
    if (!tensor.defined()) return;
    const bool is_written = argument.alias_info() && argument.alias_info()->isWrite();
    const bool is_number = tensor.is_cpu() && tensor.dim() == 0 && !is_written;
    TORCH_CHECK(is_number || (tensor.is_cpu() && takes_cpu_tensors(schema_.name())),
                "Expected all tensors to be on the same device, but found at least two devices, "
                "mps:0 and ",
                tensor.device(), "! (when checking argument for argument ", argument.name(),
                " in method ", schema_.name(), ")");
  }

  at::Tensor result(const at::Tensor& tensor) {
    return device_is_explicit_ && is_for_cpu_ ? tensor : aliases_.to_mps(tensor);
  }

  template <typename Function>
  static c10::IValue map_tensors(c10::IValue value, Function&& function) {
    if (value.isTensor()) return function(value.toTensor());
    if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (auto& tensor : tensors) tensor = function(tensor);
      return c10::List<at::Tensor>(at::TensorList(tensors));
    }
    if (value.isOptionalTensorList()) {
      auto tensors = value.toOptionalTensorVector();
      for (auto& tensor : tensors) {
        if (tensor) tensor = function(*tensor);
      }
      return c10::List<std::optional<at::Tensor>>(
          c10::ArrayRef<std::optional<at::Tensor>>(tensors));
    }
    return value;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  CpuAliases aliases_;
  bool device_is_explicit_ = false;
  bool is_for_cpu_ = false;
};

void cpu_fallback(const c10::OperatorHandle& op, Stack* stack) {
  Call(op).run(stack);
}

// Composite operators that the fallback alone would never see: they pick a kernel by device inside, or
// call an `out=` kernel of the CPU in a way that it warns about.
constexpr std::array kCompositesToCatch = {"convolution", "convolution_backward", "mse_loss",
                                           "smooth_l1_loss"};

}  // namespace

TORCH_LIBRARY_IMPL(_, MPS, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&cpu_fallback>());
}

TORCH_LIBRARY_IMPL(aten, MPS, library) {
  for (const char* name : kCompositesToCatch) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&cpu_fallback>());
  }
}

}  // namespace sim
