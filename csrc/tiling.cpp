#include "tiling.h"

#include <algorithm>

#include "../metal/instances.h"

namespace flash_mps {

namespace {

#define FLASH_MPS_TILING(family, bytes, head_dim, block_q, block_k, path, q_home) \
  Tiling{GpuFamily::family, bytes, head_dim, block_q, block_k, OperandPath::path, QHome::q_home},

constexpr Tiling kFlashFwd[] = {FLASH_FWD_INSTANCES(FLASH_MPS_TILING)};

}  // namespace

std::span<const Tiling> flash_fwd_tilings() {
  return kFlashFwd;
}

GpuFamily tuned_family(int apple_family) {
  if (apple_family >= 10) return GpuFamily::Apple10;
  if (apple_family == 9) return GpuFamily::Apple9;
  return GpuFamily::Apple7;
}

const Tiling* choose_flash_fwd(GpuFamily family, int element_bytes, int head_dim, int head_dim_v) {
  const int needed = std::max(head_dim, head_dim_v);
  const auto* row = std::ranges::find_if(kFlashFwd, [&](const Tiling& tiling) {
    return tiling.family == family && tiling.element_bytes == element_bytes &&
           tiling.max_head_dim >= needed;
  });
  return row == std::end(kFlashFwd) ? nullptr : row;
}

}  // namespace flash_mps
