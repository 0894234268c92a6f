// The tuned instances of each kernel. Rows of one family and element size are ordered by head_dim:
// the first whose max_head_dim holds max(head_dim, head_dim_v) is taken.
//
// X(family, element_bytes, max_head_dim, block_q, block_k, operand_path, q_home)
//   family        the oldest Apple GPU family the row is for; Apple7 also serves Apple8
//   operand_path  Staged: K and V tiles are copied to threadgroup memory once per threadgroup
//                 Direct: every simdgroup reads K and V from device memory, served by the cache
//   q_home        Registers: the Q tile is read once and kept
//                 Device:    it is read again for every K block, where registers would spill. Not with
//                            staged K and V: against a block_k of 8 that would triple the traffic
//
// Apple7 and Apple8 have an 8 KB L1 cache, so K and V are staged; block_k keeps both tiles within about
// 17 KB, three or more threadgroups a core. From Apple9 on registers, threadgroup memory and cache
// share one pool: small query blocks that read operands directly do better (Metal FlashAttention,
// AttentionDescriptor tables).
#pragma once

// clang-format off
#define FLASH_FWD_INSTANCES(X)                          \
  X(Apple7, 2, 64, 32, 32, Staged, Registers)           \
  X(Apple7, 2, 128, 32, 16, Staged, Registers)          \
  X(Apple7, 2, 256, 32, 8, Staged, Registers)           \
  X(Apple7, 4, 64, 32, 16, Staged, Registers)           \
  X(Apple7, 4, 128, 32, 8, Staged, Registers)           \
  X(Apple7, 4, 256, 32, 8, Staged, Registers)           \
  X(Apple9, 2, 64, 16, 32, Direct, Registers)           \
  X(Apple9, 2, 128, 16, 32, Direct, Registers)          \
  X(Apple9, 2, 256, 16, 16, Direct, Device)             \
  X(Apple9, 4, 64, 16, 32, Direct, Registers)           \
  X(Apple9, 4, 128, 16, 16, Direct, Registers)          \
  X(Apple9, 4, 256, 16, 16, Direct, Device)             \
  X(Apple10, 2, 64, 32, 32, Direct, Registers)          \
  X(Apple10, 2, 128, 32, 32, Direct, Registers)         \
  X(Apple10, 2, 256, 32, 16, Direct, Device)            \
  X(Apple10, 4, 64, 32, 32, Direct, Registers)          \
  X(Apple10, 4, 128, 32, 16, Direct, Registers)         \
  X(Apple10, 4, 256, 32, 16, Direct, Device)
// clang-format on
