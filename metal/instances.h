// The tuned instances of each kernel. Rows of one family and element size are ordered by head_dim:
// the first whose max_head_dim holds max(head_dim, head_dim_v) is taken.
//
// X(family, element_bytes, max_head_dim, block_q, block_k, operand_path, home)
//   family        the oldest Apple GPU family the row is for; Apple7 also serves Apple8
//   operand_path  of the tiles that stream past (K and V; Q and dO in flash_bwd_dkv)
//                 Staged: they are copied to threadgroup memory once per threadgroup
//                 Direct: every simdgroup reads them from device memory, served by the cache
//   home          of the tiles that stay (Q; Q and dO in flash_bwd_dq; K and V in flash_bwd_dkv)
//                 Registers: they are read once and kept
//                 Device:    they are read again for every block, where registers would spill
//
// Apple7 and Apple8 have an 8 KB L1 cache, so tiles are staged; the block keeps both within about 17 KB,
// three or more threadgroups a core, up to a head_dim of 256. Rows of 576 float32 need more, in the
// backward more than there is. From Apple9 on registers, threadgroup memory and cache share one pool:
// small query blocks that read operands directly do better (Metal FlashAttention, AttentionDescriptor
// tables).
#pragma once

// clang-format off
#define FLASH_FWD_INSTANCES(X)                          \
  X(Apple7, 2, 64, 32, 32, Staged, Registers)           \
  X(Apple7, 2, 128, 32, 16, Staged, Registers)          \
  X(Apple7, 2, 256, 32, 8, Staged, Registers)           \
  X(Apple7, 2, 576, 32, 8, Staged, Device)              \
  X(Apple7, 4, 64, 32, 16, Staged, Registers)           \
  X(Apple7, 4, 128, 32, 8, Staged, Registers)           \
  X(Apple7, 4, 256, 32, 8, Staged, Registers)           \
  X(Apple7, 4, 576, 32, 8, Staged, Device)              \
  X(Apple9, 2, 64, 16, 32, Direct, Registers)           \
  X(Apple9, 2, 128, 16, 32, Direct, Registers)          \
  X(Apple9, 2, 256, 16, 16, Direct, Device)             \
  X(Apple9, 2, 576, 16, 16, Direct, Device)             \
  X(Apple9, 4, 64, 16, 32, Direct, Registers)           \
  X(Apple9, 4, 128, 16, 16, Direct, Registers)          \
  X(Apple9, 4, 256, 16, 16, Direct, Device)             \
  X(Apple9, 4, 576, 16, 16, Direct, Device)             \
  X(Apple10, 2, 64, 32, 32, Direct, Registers)          \
  X(Apple10, 2, 128, 32, 32, Direct, Registers)         \
  X(Apple10, 2, 256, 32, 16, Direct, Device)            \
  X(Apple10, 2, 576, 32, 16, Direct, Device)            \
  X(Apple10, 4, 64, 32, 32, Direct, Registers)          \
  X(Apple10, 4, 128, 32, 16, Direct, Registers)         \
  X(Apple10, 4, 256, 32, 16, Direct, Device)            \
  X(Apple10, 4, 576, 32, 16, Direct, Device)

#define FLASH_BWD_DQ_INSTANCES(X)                       \
  X(Apple7, 2, 64, 32, 32, Staged, Registers)           \
  X(Apple7, 2, 128, 32, 16, Staged, Registers)          \
  X(Apple7, 2, 256, 32, 16, Staged, Device)             \
  X(Apple7, 2, 576, 32, 8, Staged, Device)              \
  X(Apple7, 4, 64, 32, 16, Staged, Registers)           \
  X(Apple7, 4, 128, 32, 16, Staged, Device)             \
  X(Apple7, 4, 256, 32, 8, Staged, Device)              \
  X(Apple7, 4, 576, 32, 16, Direct, Device)             \
  X(Apple9, 2, 64, 16, 32, Direct, Registers)           \
  X(Apple9, 2, 128, 16, 16, Direct, Registers)          \
  X(Apple9, 2, 256, 16, 16, Direct, Device)             \
  X(Apple9, 2, 576, 16, 16, Direct, Device)             \
  X(Apple9, 4, 64, 16, 16, Direct, Registers)           \
  X(Apple9, 4, 128, 16, 16, Direct, Device)             \
  X(Apple9, 4, 256, 16, 8, Direct, Device)              \
  X(Apple9, 4, 576, 16, 8, Direct, Device)              \
  X(Apple10, 2, 64, 32, 32, Direct, Registers)          \
  X(Apple10, 2, 128, 32, 16, Direct, Registers)         \
  X(Apple10, 2, 256, 32, 16, Direct, Device)            \
  X(Apple10, 2, 576, 32, 16, Direct, Device)            \
  X(Apple10, 4, 64, 32, 16, Direct, Registers)          \
  X(Apple10, 4, 128, 32, 16, Direct, Device)            \
  X(Apple10, 4, 256, 32, 8, Direct, Device)             \
  X(Apple10, 4, 576, 32, 8, Direct, Device)

#define FLASH_BWD_DKV_INSTANCES(X)                      \
  X(Apple7, 2, 64, 16, 32, Staged, Registers)           \
  X(Apple7, 2, 128, 16, 32, Staged, Registers)          \
  X(Apple7, 2, 256, 16, 32, Staged, Device)             \
  X(Apple7, 2, 576, 8, 32, Staged, Device)              \
  X(Apple7, 4, 64, 16, 32, Staged, Registers)           \
  X(Apple7, 4, 128, 8, 32, Staged, Device)              \
  X(Apple7, 4, 256, 8, 32, Staged, Device)              \
  X(Apple7, 4, 576, 16, 32, Direct, Device)             \
  X(Apple9, 2, 64, 16, 16, Direct, Registers)           \
  X(Apple9, 2, 128, 16, 16, Direct, Registers)          \
  X(Apple9, 2, 256, 16, 16, Direct, Device)             \
  X(Apple9, 2, 576, 16, 16, Direct, Device)             \
  X(Apple9, 4, 64, 16, 16, Direct, Registers)           \
  X(Apple9, 4, 128, 16, 16, Direct, Device)             \
  X(Apple9, 4, 256, 8, 16, Direct, Device)              \
  X(Apple9, 4, 576, 8, 16, Direct, Device)              \
  X(Apple10, 2, 64, 16, 32, Direct, Registers)          \
  X(Apple10, 2, 128, 16, 32, Direct, Registers)         \
  X(Apple10, 2, 256, 16, 32, Direct, Device)            \
  X(Apple10, 2, 576, 16, 32, Direct, Device)            \
  X(Apple10, 4, 64, 16, 32, Direct, Registers)          \
  X(Apple10, 4, 128, 16, 32, Direct, Device)            \
  X(Apple10, 4, 256, 8, 32, Direct, Device)             \
  X(Apple10, 4, 576, 8, 32, Direct, Device)

// X(family, element_bytes, max_head_dim, rows, block_k, operand_path, num_simdgroups)
//   element_bytes  of K and V; 1 is int8
//   rows           a simdgroup keeps Q and O of so many rows in registers, about 100 of them a lane
//   operand_path   Direct: simdgroups split the keys and have all rows; they read K and V from device
//                  memory, each key once, and block_k plays no part
//                  Staged: they have up to num_simdgroups * rows rows between them, and read K and V
//                  from threadgroup memory, block_k keys at a time
// Of one max_head_dim, the first that holds all rows is taken, or the last. Every family has the same
// rows: the work is bound by reading K and V once.
#define FLASH_DECODE_INSTANCES(X)                       \
  X(Apple7, 1, 128, 1, 0, Direct, 8)                    \
  X(Apple7, 1, 128, 2, 0, Direct, 8)                    \
  X(Apple7, 1, 128, 4, 32, Staged, 8)                   \
  X(Apple7, 1, 128, 4, 32, Staged, 16)                  \
  X(Apple7, 1, 256, 1, 0, Direct, 8)                    \
  X(Apple7, 1, 256, 2, 0, Direct, 8)                    \
  X(Apple7, 1, 256, 4, 16, Staged, 8)                   \
  X(Apple7, 1, 256, 4, 16, Staged, 16)                  \
  X(Apple7, 1, 576, 1, 0, Direct, 8)                    \
  X(Apple7, 1, 576, 2, 8, Staged, 8)                    \
  X(Apple7, 2, 128, 1, 0, Direct, 8)                    \
  X(Apple7, 2, 128, 2, 0, Direct, 8)                    \
  X(Apple7, 2, 128, 4, 0, Direct, 8)                    \
  X(Apple7, 2, 128, 4, 32, Staged, 8)                   \
  X(Apple7, 2, 128, 4, 32, Staged, 16)                  \
  X(Apple7, 2, 256, 1, 0, Direct, 8)                    \
  X(Apple7, 2, 256, 2, 0, Direct, 8)                    \
  X(Apple7, 2, 256, 4, 0, Direct, 8)                    \
  X(Apple7, 2, 256, 4, 16, Staged, 8)                   \
  X(Apple7, 2, 256, 4, 16, Staged, 16)                  \
  X(Apple7, 2, 576, 1, 0, Direct, 8)                    \
  X(Apple7, 2, 576, 2, 0, Direct, 8)                    \
  X(Apple7, 2, 576, 2, 8, Staged, 8)                    \
  X(Apple7, 4, 128, 1, 0, Direct, 8)                    \
  X(Apple7, 4, 128, 2, 0, Direct, 8)                    \
  X(Apple7, 4, 128, 4, 0, Direct, 8)                    \
  X(Apple7, 4, 128, 4, 16, Staged, 8)                   \
  X(Apple7, 4, 128, 4, 16, Staged, 16)                  \
  X(Apple7, 4, 256, 1, 0, Direct, 8)                    \
  X(Apple7, 4, 256, 2, 0, Direct, 8)                    \
  X(Apple7, 4, 256, 4, 0, Direct, 8)                    \
  X(Apple7, 4, 256, 4, 8, Staged, 8)                    \
  X(Apple7, 4, 256, 4, 8, Staged, 16)                   \
  X(Apple7, 4, 576, 1, 0, Direct, 8)                    \
  X(Apple7, 4, 576, 1, 4, Staged, 8)

// The combine pass keeps a weight for each split in threadgroup memory.
#define FLASH_DECODE_MAX_SPLITS 128

// One row for every family: a mask's gradient is read-bound, and each simdgroup works alone.
#define FLASH_BWD_DMASK_BLOCK_K 16
// Columns that one threadgroup accumulates, its head block: of O in flash_fwd and dQ in flash_bwd_dq at
// most, 72 registers a lane; of each of dK and dV in flash_bwd_dkv, 32 + 32.
#define FLASH_HEAD_COLUMNS 288
#define FLASH_BWD_DKV_COLUMNS 128
// clang-format on
