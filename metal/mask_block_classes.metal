// mask_block_classes: what each block of a mask lets through, for the attention kernels: they skip the
// blocks that hide every pair, and do not read the mask of those that let every pair through as it is.
//
//   for each block of 32 queries and 32 keys:
//     is_seen = any element is not -inf; is_changed = any element is not 0
//     class = hidden unless is_seen; mixed where is_changed; open otherwise
//
// A boolean mask has elements 0 (visible) and -inf. A dimension that the mask broadcasts has one block,
// which stands for all.
//
// Grid: (blocks of keys / simdgroups, blocks of queries, batch entries · heads of the mask). Threadgroup:
// simdgroups with a block each. No threadgroup memory. Launched by csrc/block_classes.cpp.

#include "attn_params.h"
#include "mask.h"
#include "score_mod.h"

namespace flash_mps {

template <typename T>
[[kernel]] void mask_block_classes(
    const device uchar* mask [[buffer(kMaskBuffer)]],
    device uchar* block_classes [[buffer(kBlockClassesBuffer)]],
    constant MaskClassParams& params [[buffer(kParamsBuffer)]],
    uint3 block [[threadgroup_position_in_grid]],
    uint num_simdgroups [[simdgroups_per_threadgroup]],
    uint simdgroup_idx [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int kSize = FLASH_MPS_CLASS_BLOCK;
  constexpr int kStep = 8 * kSimdWidth;  // elements between two looks at what is known
  constexpr uint kSeen = 1, kChanged = 2;

  // Locate the block.
  const int k_block = int(block.x * num_simdgroups + simdgroup_idx);
  if (k_block >= params.num_k_blocks) {
    return;
  }
  const int q_block = int(block.y);
  const int batch_idx = int(block.z) / params.num_heads_q;
  const int head_idx = int(block.z) % params.num_heads_q;
  const device uchar* plane = mask_plane<T>(params, mask, batch_idx, head_idx);
  const int q_start = q_block * kSize;
  const int k_start = k_block * kSize;
  const int columns = metal::min(kSize, params.seqlen_k - k_start);
  const int count = metal::min(kSize, params.seqlen_q - q_start) * columns;

  // is_seen = any element is not -inf; is_changed = any element is not 0
  uint found = 0;
  for (int first = 0; first < count && found != (kSeen | kChanged); first += kStep) {
    const int end = metal::min(first + kStep, count);
    for (int i = first + int(lane); i < end; i += kSimdWidth) {
      const int64_t q_idx = q_start + i / columns;
      const int64_t k_idx = k_start + i % columns;
      const float bias =
          mask_bias<T>(plane, q_idx * params.mask_stride_q + k_idx * params.mask_stride_k);
      found |= (bias != -INFINITY ? kSeen : 0u) | (bias != 0.0f ? kChanged : 0u);
    }
    found = metal::simd_or(found);
  }

  // class = hidden unless is_seen; mixed where is_changed; open otherwise
  if (lane == 0) {
    const int64_t row = int64_t(block.z) * params.num_q_blocks + q_block;
    const int seen_class = (found & kChanged) != 0 ? kMixedBlock : kOpenBlock;
    block_classes[row * params.num_k_blocks + k_block] =
        uchar((found & kSeen) != 0 ? seen_class : kHiddenBlock);
  }
}

}  // namespace flash_mps
