// The kernels' source text, embedded at build time by build_support/embed.py.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace flash_mps {

// metal/<name>.metal with its includes in place; throws std::out_of_range for another name.
std::string_view metal_source(std::string_view name);

}  // namespace flash_mps
