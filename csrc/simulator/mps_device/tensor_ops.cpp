// The operators that the simulated device answers itself: allocation, views, copies, and the few that
// must know what an mps storage is.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <torch/library.h>

#include <limits>

#include "allocator.h"
#include "cpu_alias.h"
#include "stream.h"

namespace sim {
namespace {

using at::Tensor;

constexpr c10::DispatchKeySet kMpsKeys(c10::DispatchKey::MPS);

at::ScalarType check_options(std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                             std::optional<bool> pin_memory) {
  const auto type = dtype.value_or(at::get_default_dtype_as_scalartype());
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "Expected strided layout on mps, got ",
              layout.value_or(at::kStrided));
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK_TYPE(
      type != at::kDouble && type != at::kComplexDouble,
      "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support "
      "float64. Please use float32 instead.");
  return type;
}

bool fills_uninitialized_memory() {
  return at::globalContext().deterministicAlgorithms() &&
         at::globalContext().deterministicFillUninitializedMemory();
}

Tensor filled_if_deterministic(Tensor tensor) {
  if (C10_UNLIKELY(fills_uninitialized_memory())) at::native::fill_empty_deterministic_(tensor);
  return tensor;
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
             std::optional<at::Layout> layout, std::optional<at::Device>,
             std::optional<bool> pin_memory, std::optional<at::MemoryFormat> memory_format) {
  const auto type = check_options(dtype, layout, pin_memory);
  return filled_if_deterministic(
      at::detail::empty_generic(size, device_allocator(), kMpsKeys, type, memory_format));
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                     std::optional<at::Device>, std::optional<bool> pin_memory) {
  const auto type = check_options(dtype, layout, pin_memory);
  return filled_if_deterministic(
      at::detail::empty_strided_generic(size, stride, device_allocator(), kMpsKeys, type));
}

Tensor efficient_zero_tensor(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                             std::optional<at::Layout> layout, std::optional<at::Device>,
                             std::optional<bool> pin_memory) {
  const auto type = check_options(dtype, layout, pin_memory);
  at::native::ZeroTensorAllocator allocator(at::Device(at::kMPS, 0));
  return at::detail::empty_generic(size, &allocator, kMpsKeys.add(c10::DispatchKey::ZeroTensor),
                                   type, std::nullopt);
}

// Copies between any two of mps and cpu, with the conversions, broadcasts and strides of the CPU's
// copy. The host has waited when it returns: non_blocking is a permission, not a promise.
Tensor& copy_(Tensor& self, const Tensor& source, bool) {
  if (self.is_same(source)) return self;
  for (const auto& tensor : {self, source}) {
    TORCH_CHECK(tensor.is_mps() || tensor.is_cpu(), "copy_: expected tensors on mps or cpu, got ",
                tensor.device());
  }
  wait_for_device();
  CpuAliases aliases;
  auto host = [&](const Tensor& t) { return t.is_mps() ? aliases.to_cpu(t) : t; };
  host(self).copy_(host(source));
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& destination, bool non_blocking) {
  auto target = destination;
  copy_(target, self, non_blocking);
  return destination;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& destination) {
  destination.resize_(self.sizes());
  return copy_from(self, destination, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  wait_for_device();
  return CpuAliases().to_cpu(self).item();
}

// Grows the storage when the geometry no longer fits. What an mps storage points to is an object, so
// PyTorch's own resizing, which copies bytes from there, must never see it.
void grow_to_fit(const Tensor& self) {
  if (self.numel() == 0) return;
  const size_t needed = at::detail::computeStorageNbytes(self.sizes(), self.strides(),
                                                         self.itemsize(), self.storage_offset());
  auto& storage = *self.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  if (needed > storage.nbytes()) resize_storage(storage, needed);
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size,
                      std::optional<at::MemoryFormat> memory_format) {
  if (self.sizes() != size) {
    const auto old_nbytes = self.storage().nbytes();
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    grow_to_fit(self);
    if (C10_UNLIKELY(fills_uninitialized_memory())) {
      at::native::fill_resize_deterministic_(self, static_cast<int64_t>(old_nbytes));
    }
  }
  if (memory_format) {
    TORCH_CHECK(*memory_format != at::MemoryFormat::Preserve, "Unsupported memory format ",
                *memory_format);
    self.unsafeGetTensorImpl()->empty_tensor_restride(*memory_format);
  }
  return self;
}

Tensor& set_storage_offset_(Tensor& self, at::Storage source, int64_t storage_offset,
                            at::IntArrayRef size, at::IntArrayRef stride) {
  at::native::checkSetStorage(self, source, storage_offset, size, stride);
  auto* impl = self.unsafeGetTensorImpl();
  if (stride.data()) {
    impl->set_sizes_and_strides(size, stride, storage_offset);
  } else {
    impl->set_storage_offset(storage_offset);
    impl->set_sizes_contiguous(size);
  }
  grow_to_fit(self);
  return self;
}

Tensor& set_storage_(Tensor& self, at::Storage source) {
  const auto numel = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage_offset_(self, std::move(source), 0, {numel}, {});
}

Tensor& set_tensor_(Tensor& self, const Tensor& source) {
  if (self.is_same(source)) return self;
  return set_storage_offset_(self, source.storage(), source.storage_offset(), source.sizes(),
                             source.strides());
}

Tensor& set_(Tensor& self) {
  return set_storage_offset_(self, at::empty({0}, self.options()).storage(), 0, {0}, {});
}

// PyTorch's CPU kernel of this one draws from the CPU's default generator.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p,
                                          std::optional<bool> train) {
  if (input.numel() == 0 || !train.value_or(true)) {
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  }
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input * mask * (p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

int64_t choose_math(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&,
                    double, bool, std::optional<double>, bool) {
  return static_cast<int64_t>(at::SDPBackend::math);
}

// Where no gradient is wanted, PyTorch on a Mac computes attention by this operator.
std::tuple<Tensor, Tensor> attention_math(const Tensor& query, const Tensor& key,
                                          const Tensor& value,
                                          const std::optional<Tensor>& attn_mask, double dropout_p,
                                          bool is_causal, const std::optional<Tensor>& dropout_mask,
                                          std::optional<double> scale, bool enable_gqa) {
  return at::_scaled_dot_product_attention_math(query, key, value, attn_mask, dropout_p, is_causal,
                                                dropout_mask, scale, enable_gqa);
}

// F.scaled_dot_product_attention picks its kernel from a table by device, and a torch without MPS has
// no row for it in that table.
Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value,
                 const std::optional<Tensor>& attn_mask, double dropout_p, bool is_causal,
                 std::optional<double> scale, bool enable_gqa) {
  TORCH_CHECK(
      query.dim() >= 2 && key.dim() >= 2 && value.dim() >= 2,
      "Expected query, key, and value to all be at least 2 dimensional, but got query.dim: ",
      query.dim(), ", key.dim: ", key.dim(), " and value.dim: ", value.dim(), " instead.");
  TORCH_CHECK(
      query.dtype() == key.dtype() && query.dtype() == value.dtype(),
      "Expected query, key, and value to have the same dtype, but got query.dtype: ", query.dtype(),
      " key.dtype: ", key.dtype(), " and value.dtype: ", value.dtype(), " instead.");
  TORCH_CHECK(query.device() == key.device() && query.device() == value.device(),
              "Expected query, key, and value to have the same device type, but got query.device: ",
              query.device(), " key.device: ", key.device(), " and value.device: ", value.device(),
              " instead.");
  auto bias = attn_mask;
  if (bias && bias->scalar_type() == at::kBool) {
    bias = at::zeros_like(*bias, query.options())
               .masked_fill_(bias->logical_not(), -std::numeric_limits<double>::infinity());
  }
  return std::get<0>(attention_math(query, key, value, bias, dropout_p, is_causal, std::nullopt,
                                    scale, enable_gqa));
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, MPS, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_efficientzerotensor", &efficient_zero_tensor);

  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", static_cast<Tensor (*)(const Tensor&, at::IntArrayRef)>(&at::native::view));
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);

  library.impl("copy_", &copy_);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar_dense);

  library.impl("resize_", &resize_);
  library.impl("set_", &set_);
  library.impl("set_.source_Storage", &set_storage_);
  library.impl("set_.source_Storage_storage_offset", &set_storage_offset_);
  library.impl("set_.source_Tensor", &set_tensor_);

  library.impl("native_dropout", &native_dropout);
  library.impl("_fused_sdp_choice", &choose_math);
  library.impl("_scaled_dot_product_attention_math_for_mps", &attention_math);
  library.impl("scaled_dot_product_attention", &attention);
}

TORCH_LIBRARY_IMPL(aten, AutogradMPS, library) {
  library.impl("scaled_dot_product_attention", &attention);
}

}  // namespace sim
