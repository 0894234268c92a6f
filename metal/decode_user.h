// User-defined scores in flash_decode, pair by pair: its rows are those of several heads and queries, and
// its steps over keys know no blocks.
#pragma once

#include "mask.h"
#include "score_mod.h"

namespace flash_mps {

// What the user's functions of one batch entry read.
struct UserRows {
  UserCode code;
  const device uchar* block_classes;  // or null
  int batch_idx;
};

// Whether a pair that the band shows is visible.
template <typename T>
inline bool user_shows(
    constant AttnParams& params, UserRows user, int head_idx, int q_idx, int k_idx) {
  const HeadMask head = head_mask<T>(params, nullptr, user.block_classes, user.batch_idx, head_idx);
  const int block_class = class_of_tile(params, head, q_idx, k_idx);
  if (block_class == kHiddenBlock) {
    return false;
  }
  return !has_user_mask || block_class == kOpenBlock ||
         user_visible(user.code, user.batch_idx, head_idx, q_idx, k_idx);
}

}  // namespace flash_mps
