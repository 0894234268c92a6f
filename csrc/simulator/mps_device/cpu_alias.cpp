#include "cpu_alias.h"

#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/TensorImpl.h>

#include <cstring>

#include "allocator.h"

namespace sim {
namespace {

// A tensor with the geometry of `like` over another storage.
at::Tensor tensor_over(c10::Storage storage, const at::Tensor& like, c10::DispatchKey backend) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(backend), like.dtype());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) tensor._set_conj(true);
  if (like.is_neg()) tensor._set_neg(true);
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return tensor;
}

// The bytes of an mps storage, growable as an `out=` argument must be. Holds the original alive, in
// case a kernel keeps its argument beyond the call.
c10::Storage alias_of(const c10::Storage& mps) {
  auto* owner = mps.unsafeGetStorageImpl();
  c10::raw::intrusive_ptr::incref(owner);
  c10::DataPtr data{host_data(*owner), owner,
                    [](void* storage) {
                      c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(storage));
                    },
                    c10::DeviceType::CPU};
  return c10::Storage(c10::Storage::use_byte_size_t{}, mps.nbytes(), std::move(data),
                      c10::GetCPUAllocator(), owner->resizable());
}

bool same_geometry(const at::Tensor& a, const at::Tensor& b) {
  return a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() &&
         a.strides() == b.strides();
}

}  // namespace

c10::Storage CpuAliases::cpu_storage(const c10::Storage& mps) {
  for (const auto& shared : storages_) {
    if (shared.mps.is_alias_of(mps)) return shared.cpu;
  }
  storages_.push_back({mps, alias_of(mps)});
  return storages_.back().cpu;
}

// A storage that the kernel made becomes a buffer with the same bytes; views of it stay views of it.
c10::Storage CpuAliases::mps_storage(const c10::Storage& cpu) {
  for (const auto& shared : storages_) {
    if (shared.cpu.is_alias_of(cpu)) return shared.mps;
  }
  c10::Storage mps(c10::Storage::use_byte_size_t{}, cpu.nbytes(),
                   device_allocator()->allocate(cpu.nbytes()), device_allocator(), true);
  if (cpu.nbytes()) std::memcpy(host_data(*mps.unsafeGetStorageImpl()), cpu.data(), cpu.nbytes());
  storages_.push_back({mps, cpu});
  return mps;
}

at::Tensor CpuAliases::to_cpu(const at::Tensor& mps) {
  for (const auto& shared : tensors_) {
    if (shared.mps.is_same(mps)) return shared.cpu;
  }
  auto cpu = tensor_over(cpu_storage(mps.storage()), mps, c10::DispatchKey::CPU);
  tensors_.push_back({mps, cpu});
  return cpu;
}

void CpuAliases::write_back() {
  for (const auto& shared : storages_) {
    if (shared.cpu.nbytes() == shared.mps.nbytes()) continue;
    auto& storage = *shared.mps.unsafeGetStorageImpl();
    resize_storage(storage, shared.cpu.nbytes());
    std::memcpy(host_data(storage), shared.cpu.data(), shared.cpu.nbytes());
  }
  for (const auto& [mps, cpu] : tensors_) {
    if (same_geometry(mps, cpu)) continue;
    mps.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(),
                                                     cpu.storage_offset());
  }
}

at::Tensor CpuAliases::to_mps(const at::Tensor& cpu) {
  if (!cpu.defined() || !cpu.is_cpu()) return cpu;
  for (const auto& shared : tensors_) {
    if (shared.cpu.is_same(cpu)) return shared.mps;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(cpu.layout() == at::kStrided && !cpu.is_quantized(),
                              "the simulated mps device has strided tensors only, not ",
                              cpu.toString());
  TORCH_CHECK_TYPE(
      cpu.scalar_type() != at::kDouble && cpu.scalar_type() != at::kComplexDouble,
      "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support "
      "float64. Please use float32 instead.");
  return tensor_over(mps_storage(cpu.storage()), cpu, c10::DispatchKey::MPS);
}

}  // namespace sim
