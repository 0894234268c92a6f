#include "kernel_key.h"

#include <algorithm>
#include <sstream>

#include "../metal/attn_params.h"
#include "metal_sources.h"

namespace flash_mps {

namespace {

const char* msl_type(ElementType type) {
  switch (type) {
    case ElementType::Float16: return "half";
    case ElementType::BFloat16: return "bfloat";
    case ElementType::Float32: break;
  }
  return "float";
}

}  // namespace

int element_bytes(ElementType type) {
  return type == ElementType::Float32 ? 4 : 2;
}

const char* element_name(ElementType type) {
  switch (type) {
    case ElementType::Float16: return "f16";
    case ElementType::BFloat16: return "bf16";
    case ElementType::Float32: break;
  }
  return "f32";
}

int instance_head_dim(int64_t head_dim) {
  return static_cast<int>(std::max<int64_t>(8, (head_dim + 7) / 8 * 8));
}

uint64_t FlashFwdKey::cache_key() const {
  const auto row = static_cast<uint64_t>(tiling - flash_fwd_tilings().data());
  return row | static_cast<uint64_t>(type) << 8 | static_cast<uint64_t>(mask_kind) << 12 |
         static_cast<uint64_t>(has_lse) << 16 | static_cast<uint64_t>(head_dim) << 20 |
         static_cast<uint64_t>(head_dim_v) << 36;
}

std::string FlashFwdKey::name() const {
  std::ostringstream out;
  out << "flash_fwd_" << element_name(type) << "_d" << head_dim;
  if (head_dim_v != head_dim) out << "_dv" << head_dim_v;
  out << "_bq" << tiling->block_q << "_bk" << tiling->block_k << "_sg" << tiling->num_simdgroups();
  if (tiling->path == OperandPath::Direct) out << "_direct";
  if (tiling->q_home == QHome::Device) out << "_qdevice";
  return out.str();
}

KernelSource FlashFwdKey::source() const {
  std::ostringstream function;
  function << "flash_mps::flash_fwd<" << msl_type(type) << ", " << head_dim << ", " << head_dim_v
           << ", " << tiling->block_q << ", " << tiling->block_k << ", "
           << (tiling->path == OperandPath::Staged) << ", " << (tiling->q_home == QHome::Registers)
           << ">";
  std::ostringstream msl;
  msl << metal_source("flash_fwd") << "template [[host_name(\"" << name()
      << "\")]] [[kernel]] decltype(" << function.str() << ") " << function.str() << ";\n";
  return {
      .name = name(),
      .msl = msl.str(),
      .int_constants = {{kMaskKindConstant, mask_kind}},
      .bool_constants = {{kHasLseConstant, has_lse}},
  };
}

}  // namespace flash_mps
