// Block sizes and operand homes by kernel, GPU family, element size and head_dim: metal/instances.h,
// looked up.
#pragma once

#include <cstdint>
#include <span>

namespace flash_mps {

enum class Op {
  FlashFwd,
  FlashBwdDelta,
  FlashBwdDq,
  FlashBwdDkv,
  FlashBwdDmask,
  FlashDecode,
  FlashDecodeCombine,
  KvcacheAppend,
  RotaryEmbedding,
  MaskBlockClasses,
};
enum class GpuFamily { Apple7 = 7, Apple9 = 9, Apple10 = 10 };
enum class OperandPath { Staged, Direct };
enum class OperandHome { Registers, Device };

struct Tiling {
  Op op;
  GpuFamily family;
  int element_bytes;
  int max_head_dim;
  int block_q;  // in flash_decode: rows of one simdgroup
  int block_k;
  OperandPath path;
  OperandHome home;
  int num_simdgroups;

  // Rows of flash_decode that read K and V together.
  int max_rows() const { return path == OperandPath::Staged ? block_q * num_simdgroups : block_q; }
};

// The table's rows, in order. Empty for an op without one.
std::span<const Tiling> tilings();

// The family whose rows serve a GPU of Apple family N (see Device::gpu_family()).
GpuFamily tuned_family(int apple_family);

// The row for a problem; null when head_dim is beyond the table. Not for flash_decode.
const Tiling* choose(Op op, GpuFamily family, int element_bytes, int head_dim, int head_dim_v);

// The row of flash_decode for `num_rows` rows that read one KV head; null when head_dim is beyond the
// table.
const Tiling* choose_decode(int element_bytes, int head_dim, int head_dim_v, int64_t num_rows);

// How threadgroups share the columns of a result that one could not accumulate: of O in flash_fwd, dQ in
// flash_bwd_dq, dK and dV in flash_bwd_dkv.
struct HeadBlocks {
  int count;
  int columns;  // of each; the last may have fewer
};

// Both head dimensions as those of an instance, multiples of 8.
HeadBlocks head_blocks(Op op, int head_dim, int head_dim_v);

// The largest head_dim that the table holds for an op.
int max_head_dim(Op op);

// How many threadgroups of flash_decode share the keys of one KV head and sequence: enough to give
// every core of the GPU its threadgroups, as long as each has keys to be worth a second pass.
// gpu_cores: 0 when unknown.
int num_splits(int64_t batch, int64_t num_heads_kv, int64_t seqlen_k, GpuFamily family,
               int gpu_cores);

// What mask_block_classes would cost a call, and what it could save.
struct MaskPass {
  double mask_bytes;  // of all elements, each once
  double key_bytes;  // of K and V that would be read for keys that no row sees, too
  // Multiplications and additions over every (query, key) pair of every head, backward included where
  // one will follow.
  double products;
};

// Whether a call classifies the blocks of its mask first. What the mask holds is not known: the pass has
// to be so small beside the call that it costs little where it finds nothing to skip.
bool mask_pass_pays(const MaskPass& pass);

}  // namespace flash_mps
