#include "tiling.h"

#include <algorithm>

#include "../metal/instances.h"

namespace flash_mps {

namespace {

#define FLASH_MPS_ROW(op, family, bytes, head_dim, block_q, block_k, path, home)                 \
  Tiling{                                                                                        \
      Op::op,           GpuFamily::family, bytes, head_dim, block_q, block_k, OperandPath::path, \
      OperandHome::home},
#define FLASH_MPS_FWD(...) FLASH_MPS_ROW(FlashFwd, __VA_ARGS__)
#define FLASH_MPS_DQ(...) FLASH_MPS_ROW(FlashBwdDq, __VA_ARGS__)
#define FLASH_MPS_DKV(...) FLASH_MPS_ROW(FlashBwdDkv, __VA_ARGS__)

constexpr Tiling kTilings[] = {FLASH_FWD_INSTANCES(FLASH_MPS_FWD) FLASH_BWD_DQ_INSTANCES(
    FLASH_MPS_DQ) FLASH_BWD_DKV_INSTANCES(FLASH_MPS_DKV)};

}  // namespace

std::span<const Tiling> tilings() {
  return kTilings;
}

GpuFamily tuned_family(int apple_family) {
  if (apple_family >= 10) return GpuFamily::Apple10;
  if (apple_family == 9) return GpuFamily::Apple9;
  return GpuFamily::Apple7;
}

const Tiling* choose(Op op, GpuFamily family, int element_bytes, int head_dim, int head_dim_v) {
  const int needed = std::max(head_dim, head_dim_v);
  const auto* row = std::ranges::find_if(kTilings, [&](const Tiling& tiling) {
    return tiling.op == op && tiling.family == family && tiling.element_bytes == element_bytes &&
           tiling.max_head_dim >= needed;
  });
  return row == std::end(kTilings) ? nullptr : row;
}

int max_head_dim() {
  return std::ranges::max(kTilings, {}, &Tiling::max_head_dim).max_head_dim;
}

}  // namespace flash_mps
