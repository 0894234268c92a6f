// Random numbers of the simulated device: PyTorch's CPU generators, derived from the mps generator.
#pragma once

#include <ATen/core/Generator.h>

#include <optional>

namespace sim {

// The CPU generator for the next random operator on the device: a function of the mps generator's seed
// and offset only, which it advances. Unset means the device's default generator.
at::Generator cpu_generator_for(const std::optional<at::Generator>& mps_generator);

}  // namespace sim
