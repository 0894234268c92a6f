// Block sizes and operand homes by GPU family, element size and head_dim: metal/instances.h, looked up.
#pragma once

#include <span>

namespace flash_mps {

enum class GpuFamily { Apple7 = 7, Apple9 = 9, Apple10 = 10 };
enum class OperandPath { Staged, Direct };
enum class QHome { Registers, Device };

struct Tiling {
  GpuFamily family;
  int element_bytes;
  int max_head_dim;
  int block_q;
  int block_k;
  OperandPath path;
  QHome q_home;

  int num_simdgroups() const { return block_q / 8; }
};

// The table's rows, in order.
std::span<const Tiling> flash_fwd_tilings();

// The family whose rows serve a GPU of Apple family N (see Device::gpu_family()).
GpuFamily tuned_family(int apple_family);

// The row for a problem; null when head_dim is beyond the table.
const Tiling* choose_flash_fwd(GpuFamily family, int element_bytes, int head_dim, int head_dim_v);

}  // namespace flash_mps
