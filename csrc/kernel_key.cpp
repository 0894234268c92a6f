#include "kernel_key.h"

#include <algorithm>
#include <sstream>

#include "../metal/attn_params.h"
#include "../metal/instances.h"
#include "../metal/kv_cache_params.h"
#include "metal_sources.h"
#include "user_code.h"

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

// The text of an op's kernel, with the user's in place of user_score.h.
std::string source_text(const char* op, uint32_t user_code) {
  std::string text(metal_source(op));
  if (user_code == 0) return text;
  const std::string_view begin_mark = "#line 1 \"user_score.h\"\n";
  const size_t begin = text.find(begin_mark) + begin_mark.size();
  return text.replace(begin, text.find("#line ", begin) - begin, user_code_text(user_code));
}

// FNV-1a, in hexadecimal.
std::string hash_of(const std::string& text) {
  uint32_t hash = 2166136261u;
  for (const char letter : text) hash = (hash ^ static_cast<unsigned char>(letter)) * 16777619u;
  std::ostringstream out;
  out << std::hex << hash;
  return out.str();
}

}  // namespace

const char* op_name(Op op) {
  switch (op) {
    case Op::FlashBwdDelta: return "flash_bwd_delta";
    case Op::FlashBwdDq: return "flash_bwd_dq";
    case Op::FlashBwdDkv: return "flash_bwd_dkv";
    case Op::FlashBwdDmask: return "flash_bwd_dmask";
    case Op::FlashDecode: return "flash_decode";
    case Op::FlashDecodeCombine: return "flash_decode_combine";
    case Op::KvcacheAppend: return "kvcache_append";
    case Op::RotaryEmbedding: return "rotary_embedding";
    case Op::MaskBlockClasses: return "mask_block_classes";
    case Op::FlashFwd: break;
  }
  return "flash_fwd";
}

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

uint64_t KernelKey::cache_key() const {
  const auto row = tiling != nullptr ? static_cast<uint64_t>(tiling - tilings().data()) : 0;
  return row | static_cast<uint64_t>(type) << 8 | static_cast<uint64_t>(mask_kind) << 10 |
         static_cast<uint64_t>(op) << 12 | static_cast<uint64_t>(head_dim / 8) << 16 |
         static_cast<uint64_t>(head_dim_v / 8) << 24 | static_cast<uint64_t>(constants) << 32 |
         static_cast<uint64_t>(user_code) << 48;
  static_assert(kHasUserCodeConstant < 16 && kMaxUserCodes <= 1 << 16, "fields of the key overlap");
}

std::string KernelKey::name() const {
  std::ostringstream out;
  out << op_name(op) << "_" << element_name(type);
  if (head_dim != 0) out << "_d" << head_dim;
  if (head_dim_v != head_dim) out << "_dv" << head_dim_v;
  if (op == Op::FlashBwdDmask && mask_kind == kFloatMask) out << "_f32mask";
  if (tiling == nullptr) return out.str();
  if (has(kIsQuantizedConstant)) out << "_kv8";
  out << "_bq" << tiling->block_q;
  if (tiling->block_k != 0) out << "_bk" << tiling->block_k;
  out << "_sg" << tiling->num_simdgroups;
  if (tiling->path == OperandPath::Direct) out << "_direct";
  if (tiling->home == OperandHome::Device) out << "_reread";
  if (user_code != 0) out << "_user" << hash_of(user_code_text(user_code));
  return out.str();
}

KernelSource KernelKey::source() const {
  std::ostringstream function;
  function << "flash_mps::" << op_name(op) << "<" << msl_type(type);
  if (op == Op::FlashBwdDmask) {
    function << ", " << msl_type(mask_kind == kFloatMask ? ElementType::Float32 : type) << ", "
             << head_dim << ", " << head_dim_v << ", " << FLASH_BWD_DMASK_BLOCK_K;
  } else if (op == Op::FlashDecode) {
    function << ", " << (has(kIsQuantizedConstant) ? "char" : msl_type(type)) << ", " << head_dim
             << ", " << head_dim_v << ", " << tiling->block_q << ", " << tiling->block_k << ", "
             << tiling->num_simdgroups << ", " << (tiling->path == OperandPath::Staged);
  } else if (tiling != nullptr) {
    function << ", " << head_dim << ", " << head_dim_v << ", " << tiling->block_q << ", "
             << tiling->block_k << ", " << (tiling->path == OperandPath::Staged) << ", "
             << (tiling->home == OperandHome::Registers) << ", "
             << head_blocks(op, head_dim, head_dim_v).columns;
  }
  function << ">";
  std::ostringstream msl;
  msl << source_text(op_name(op), user_code) << "template [[host_name(\"" << name()
      << "\")]] [[kernel]] decltype(" << function.str() << ") " << function.str() << ";\n";
  KernelSource source = {
      .name = name(),
      .msl = msl.str(),
      .int_constants = {{kMaskKindConstant, mask_kind}},
  };
  for (uint32_t id = kMaskKindConstant + 1; id < 32; ++id) {
    source.bool_constants.emplace_back(id, has(id));
  }
  return source;
}

}  // namespace flash_mps
