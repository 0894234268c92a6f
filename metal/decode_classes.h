// What block_classes says of keys for all rows of a row block of flash_decode. Its keys may begin anywhere
// and its rows are those of several heads, so they may lie in several blocks.
#pragma once

#include "attn_params.h"
#include "mask.h"

namespace flash_mps {

struct RowClasses {
  const device uchar* classes;  // of the first head and block of queries, or null
  int num_heads;
  int num_q_blocks;
};

// Of rows first_row ... last_row of the group whose first head is head_first.
inline RowClasses classes_of_rows(
    constant AttnDecodeParams& decode,
    const device uchar* block_classes,
    int batch_idx,
    int head_first,
    int first_row,
    int last_row) {
  constant AttnParams& params = decode.fwd;
  RowClasses rows;
  rows.classes = nullptr;
  rows.num_heads = params.class_stride_h != 0 ? params.group_size : 1;
  rows.num_q_blocks = 1;
  if (has_block_classes) {
    const int rows_per_block = params.group_size * FLASH_MPS_CLASS_BLOCK;
    const int first = first_row / rows_per_block;
    if (params.class_stride_q != 0) {
      rows.num_q_blocks = last_row / rows_per_block - first + 1;
    }
    rows.classes = block_classes + batch_idx * params.class_stride_b +
                   head_first * params.class_stride_h + first * params.class_stride_q;
  }
  return rows;
}

// The class of keys k_start ... k_end - 1 for these rows. All lanes of a simdgroup take part.
inline int class_of_keys(
    constant AttnParams& params, RowClasses rows, int k_start, int k_end, int lane) {
  if (!has_block_classes) {
    return kMixedBlock;
  }
  const int first = k_start / FLASH_MPS_CLASS_BLOCK;
  const int num_k_blocks = (k_end - 1) / FLASH_MPS_CLASS_BLOCK - first + 1;
  uint found = 0;  // one bit a class
  for (int i = lane; i < num_k_blocks * rows.num_heads * rows.num_q_blocks; i += kSimdWidth) {
    const int row = i / num_k_blocks;
    const int64_t k_block = first + i % num_k_blocks;
    found |=
        1u << uint(
            rows.classes
                [row % rows.num_heads * params.class_stride_h +
                 row / rows.num_heads * params.class_stride_q + k_block * params.class_stride_k]);
  }
  found = metal::simd_or(found);
  if (found == 1u << uint(kHiddenBlock)) {
    return kHiddenBlock;
  }
  return found == 1u << uint(kOpenBlock) ? kOpenBlock : kMixedBlock;
}

}  // namespace flash_mps
