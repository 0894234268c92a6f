// Block sizes and operand homes by kernel, GPU family, element size and head_dim: metal/instances.h,
// looked up.
#pragma once

#include <span>

namespace flash_mps {

enum class Op { FlashFwd, FlashBwdDelta, FlashBwdDq, FlashBwdDkv, FlashBwdDmask };
enum class GpuFamily { Apple7 = 7, Apple9 = 9, Apple10 = 10 };
enum class OperandPath { Staged, Direct };
enum class OperandHome { Registers, Device };

struct Tiling {
  Op op;
  GpuFamily family;
  int element_bytes;
  int max_head_dim;
  int block_q;
  int block_k;
  OperandPath path;
  OperandHome home;

  // Of the block that a threadgroup owns: keys in flash_bwd_dkv, queries elsewhere.
  int num_simdgroups() const { return (op == Op::FlashBwdDkv ? block_k : block_q) / 8; }
};

// The table's rows, in order. Empty for an op without one.
std::span<const Tiling> tilings();

// The family whose rows serve a GPU of Apple family N (see Device::gpu_family()).
GpuFamily tuned_family(int apple_family);

// The row for a problem; null when head_dim is beyond the table.
const Tiling* choose(Op op, GpuFamily family, int element_bytes, int head_dim, int head_dim_v);

// The largest head_dim that the table holds.
int max_head_dim();

}  // namespace flash_mps
