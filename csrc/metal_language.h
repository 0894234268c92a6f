// The version of Metal's language that kernels are compiled as: 3.1, the first with bfloat. Numbered
// like MTLLanguageVersion.
#pragma once

#include <cstdint>

namespace flash_mps {

inline constexpr uint32_t kMetalLanguageMajor = 3, kMetalLanguageMinor = 1;
inline constexpr uint32_t kMetalLanguage = kMetalLanguageMajor << 16 | kMetalLanguageMinor;

}  // namespace flash_mps
