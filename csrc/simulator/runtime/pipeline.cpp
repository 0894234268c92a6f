#include "pipeline.h"

#include <algorithm>

#include "device_state.h"

namespace sim {

std::shared_ptr<Pipeline> Pipeline::build(std::shared_ptr<const Library> library,
                                          std::string function_name, ConstantValues constants) {
  auto pipeline = std::make_shared<Pipeline>();
  pipeline->library_ = std::move(library);
  pipeline->function_name_ = std::move(function_name);
  pipeline->constants_ = std::move(constants);
  pipeline->info_ = pipeline->kernel(current_flavour())->info();
  pipeline->max_threads = std::min(pipeline->max_threads, pipeline->info_.max_total_threads);
  count_pipeline();
  return pipeline;
}

std::shared_ptr<const Kernel> Pipeline::kernel(Flavour flavour) {
  std::lock_guard lock(mutex_);
  auto& kernel = kernels_[static_cast<size_t>(flavour)];
  if (!kernel) kernel = Kernel::compile(library_, function_name_, constants_, flavour);
  return kernel;
}

}  // namespace sim
