// The Metal sources, embedded at build time (build_support/embed.py writes the definition).
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace flash_mps {

// The complete text of metal/<name>.metal, its includes in place; throws std::out_of_range.
std::string_view metal_source(std::string_view name);

}  // namespace flash_mps
