// CPU tensors over the bytes of mps tensors, so that PyTorch's CPU kernels run on them without a copy.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

namespace sim {

// The aliases of one call. Arguments that share a storage on the device share one on the CPU.
// The caller has waited for the device.
class CpuAliases {
 public:
  at::Tensor to_cpu(const at::Tensor& mps);

  // Carries what a kernel did to the tensors themselves back to the originals: new sizes, strides and
  // offsets, storages that grew.
  void write_back();

  // The mps tensor for a kernel's result: an argument itself, a view of an argument, or a new tensor.
  // After write_back.
  at::Tensor to_mps(const at::Tensor& cpu);

 private:
  struct SharedStorage {
    c10::Storage mps, cpu;
  };
  struct SharedTensor {
    at::Tensor mps, cpu;
  };

  c10::Storage cpu_storage(const c10::Storage& mps);
  c10::Storage mps_storage(const c10::Storage& cpu);

  c10::SmallVector<SharedStorage, 8> storages_;
  c10::SmallVector<SharedTensor, 8> tensors_;
};

}  // namespace sim
