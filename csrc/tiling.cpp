#include "tiling.h"

#include <algorithm>

#include "../metal/instances.h"

namespace flash_mps {

namespace {

// A simdgroup has 8 rows of the block that its threadgroup owns.
#define FLASH_MPS_ROW(op, owned, family, bytes, head_dim, block_q, block_k, path, home) \
  Tiling{Op::op,                                                                        \
         GpuFamily::family,                                                             \
         bytes,                                                                         \
         head_dim,                                                                      \
         block_q,                                                                       \
         block_k,                                                                       \
         OperandPath::path,                                                             \
         OperandHome::home,                                                             \
         owned / 8},
#define FLASH_MPS_FWD(family, bytes, dim, block_q, ...) \
  FLASH_MPS_ROW(FlashFwd, block_q, family, bytes, dim, block_q, __VA_ARGS__)
#define FLASH_MPS_DQ(family, bytes, dim, block_q, ...) \
  FLASH_MPS_ROW(FlashBwdDq, block_q, family, bytes, dim, block_q, __VA_ARGS__)
#define FLASH_MPS_DKV(family, bytes, dim, block_q, block_k, ...) \
  FLASH_MPS_ROW(FlashBwdDkv, block_k, family, bytes, dim, block_q, block_k, __VA_ARGS__)
#define FLASH_MPS_DECODE(family, bytes, dim, rows, block_k, path, num_simdgroups)      \
  Tiling{Op::FlashDecode,   GpuFamily::family,      bytes,         dim, rows, block_k, \
         OperandPath::path, OperandHome::Registers, num_simdgroups},

constexpr Tiling kTilings[] = {FLASH_FWD_INSTANCES(FLASH_MPS_FWD) FLASH_BWD_DQ_INSTANCES(
    FLASH_MPS_DQ) FLASH_BWD_DKV_INSTANCES(FLASH_MPS_DKV) FLASH_DECODE_INSTANCES(FLASH_MPS_DECODE)};

// Reading this many keys takes about as long as the second pass that one more split costs.
constexpr int64_t kMinKeysPerSplit = 128;

// Threadgroups of flash_decode that a core holds: 8 simdgroups of about 100 registers a lane, in 208 KB
// of registers on Apple7 and Apple8, in the larger shared pool of later families.
int threadgroups_per_core(GpuFamily family) {
  return family == GpuFamily::Apple7 ? 2 : 3;
}

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

const Tiling* choose_decode(int element_bytes, int head_dim, int head_dim_v, int64_t num_rows) {
  const int needed = std::max(head_dim, head_dim_v);
  const Tiling* chosen = nullptr;
  for (const Tiling& tiling : kTilings) {
    if (tiling.op != Op::FlashDecode || tiling.element_bytes != element_bytes ||
        tiling.max_head_dim < needed) {
      continue;
    }
    if (chosen != nullptr && chosen->max_head_dim != tiling.max_head_dim) break;
    chosen = &tiling;
    if (tiling.max_rows() >= num_rows) break;
  }
  return chosen;
}

HeadBlocks head_blocks(Op op, int head_dim, int head_dim_v) {
  const auto ceil_div = [](int count, int size) { return (count + size - 1) / size; };
  if (op == Op::FlashBwdDkv) {
    return {.count = ceil_div(std::max(head_dim, head_dim_v), FLASH_BWD_DKV_COLUMNS),
            .columns = FLASH_BWD_DKV_COLUMNS};
  }
  constexpr int kFragment = 8;
  const int width = op == Op::FlashFwd ? head_dim_v : head_dim;
  const int count = ceil_div(width, FLASH_HEAD_COLUMNS);
  return {.count = count, .columns = ceil_div(width, count * kFragment) * kFragment};
}

int max_head_dim(Op op) {
  int most = 0;
  for (const Tiling& tiling : kTilings) {
    if (tiling.op == op) most = std::max(most, tiling.max_head_dim);
  }
  return most;
}

int num_splits(int64_t batch, int64_t num_heads_kv, int64_t seqlen_k, GpuFamily family,
               int gpu_cores) {
  constexpr int kUnknownCores = 10;  // of the smallest GPUs since M2
  const int64_t cores = gpu_cores > 0 ? gpu_cores : kUnknownCores;
  const int64_t wanted = cores * threadgroups_per_core(family);
  const int64_t unsplit = std::max<int64_t>(1, batch * num_heads_kv);
  const int64_t most = std::clamp<int64_t>(seqlen_k / kMinKeysPerSplit, 1, FLASH_DECODE_MAX_SPLITS);
  return static_cast<int>(std::clamp<int64_t>((wanted + unsplit - 1) / unsplit, 1, most));
}

bool mask_pass_pays(const MaskPass& pass) {
  // Apple GPUs do 33 (M4 Max) to 38 (M1) operations in the time of reading a byte. A launch takes about
  // 5 us, 13 million operations of the smallest GPU (M1, 8 cores).
  constexpr double kOperationsPerByte = 35.0;
  constexpr double kOperationsPerLaunch = 1.3e7;
  constexpr double kMostOfTheCall = 1.0 / 40.0;
  const double cost = pass.mask_bytes * kOperationsPerByte + kOperationsPerLaunch;
  const double call = pass.products + pass.key_bytes * kOperationsPerByte;
  return cost <= kMostOfTheCall * call;
}

}  // namespace flash_mps
