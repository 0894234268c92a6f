// User-defined scores and masks: Metal source that takes the place of metal/user_score.h, by number, so
// that it can be part of a kernel's key.
#pragma once

#include <cstdint>
#include <string>

namespace flash_mps {

// There are fewer numbers than this.
constexpr uint32_t kMaxUserCodes = 1 << 16;

// The number of a text, the same each time; 0 for the empty one. Thread-safe. Throws std::length_error
// when there are too many.
uint32_t user_code_number(const std::string& text);

// The text of a number.
std::string user_code_text(uint32_t number);

}  // namespace flash_mps
