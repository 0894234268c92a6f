// Tiling and flags -> cache key, kernel name, source. The only place where a kernel name is spelled.
#pragma once

#include <cstdint>
#include <string>

#include "device.h"
#include "tiling.h"

namespace flash_mps {

enum class ElementType { Float32, Float16, BFloat16 };

int element_bytes(ElementType type);
const char* element_name(ElementType type);  // f32, f16, bf16
// The name of an op's file in metal/ and of its kernel.
const char* op_name(Op op);

// The bit of a function constant in KernelKey::constants.
constexpr uint32_t constant_bit(uint32_t id, bool is_on) {
  return static_cast<uint32_t>(is_on) << id;
}

struct KernelKey {
  Op op;
  ElementType type;
  int head_dim = 0;  // rounded up to a multiple of 8
  int head_dim_v = 0;  // the same
  int mask_kind = 0;  // MaskKind
  uint32_t constants = 0;  // bit n: the bool function constant of id n, as by constant_bit()
  uint32_t user_code = 0;  // by user_code_number()
  const Tiling* tiling = nullptr;  // null for an op without rows in the table

  bool has(uint32_t constant) const { return (constants >> constant & 1) != 0; }
  // Distinct for distinct keys; no string is built to make it.
  uint64_t cache_key() const;
  // e.g. flash_fwd_f16_d128_bq32_bk16_sg4, with _dv<n> when it differs, _direct, _reread;
  // flash_decode_f16_d128_bq4_bk32_sg8, without _bk when direct, with _kv8 for int8 keys and values;
  // with _user<hash of its text> for user-defined scores
  std::string name() const;
  KernelSource source() const;
};

// Rounds a head dimension up to what a kernel instance is made for.
int instance_head_dim(int64_t head_dim);

}  // namespace flash_mps
