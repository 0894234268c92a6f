// A function specialised and compiled: what an MTLComputePipelineState stands for.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "compiler.h"

namespace sim {

class Pipeline {
 public:
  // Compiles the flavour of the current mode; throws CompileError.
  static std::shared_ptr<Pipeline> build(std::shared_ptr<const Library> library,
                                         std::string function_name, ConstantValues constants);

  const KernelInfo& info() const { return info_; }
  // The other flavour is compiled when it is first asked for; throws CompileError.
  std::shared_ptr<const Kernel> kernel(Flavour flavour);

  std::string label;
  uint32_t max_threads = kMaxThreadsPerThreadgroup;   // lower with a descriptor's limit

 private:
  std::shared_ptr<const Library> library_;
  std::string function_name_;
  ConstantValues constants_;
  KernelInfo info_;
  std::mutex mutex_;
  std::shared_ptr<const Kernel> kernels_[2];
};

}  // namespace sim
