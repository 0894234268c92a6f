// User-defined scores: what one pair of query and key makes of its score, the derivative of that, and
// whether it is visible. This file stands for: nothing user-defined. A pipeline that has a score_mod or a
// mask_mod is compiled with the text that torch_flash_mps/flex/msl.py writes in its place, so nothing is
// included here.
#pragma once

namespace flash_mps {

constant constexpr bool has_user_score = false;
constant constexpr bool has_user_mask = false;

// The tensors that the functions read.
struct UserCode {};

// Buffers of a kernel for them, and what it makes of these.
#define FLASH_MPS_USER_BUFFERS
#define FLASH_MPS_USER_CODE \
  UserCode {}

inline float user_score(UserCode, float score, int, int, int, int) {
  return score;
}

// The derivative of user_score() by the score.
inline float user_slope(UserCode, float, int, int, int, int) {
  return 1.0f;
}

inline bool user_visible(UserCode, int, int, int, int) {
  return true;
}

}  // namespace flash_mps
