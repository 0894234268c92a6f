// The contract between the kernels that write a KV cache and their host code: parameter blocks, buffer
// slots and function-constant ids. Strides count elements; the last dimension of every tensor is dense.
#pragma once

#include "attn_params.h"

namespace flash_mps {

struct RotaryParams {
  int64_t cos_stride_s, sin_stride_s;  // cos, sin [seqlen_ro, rotary_dim / 2]
  int32_t seqlen_ro, rotary_dim;
};

// New keys or values [B, Hkv, S_new, D] and where they go: cache [entries, Hkv, slots, D], scale
// [entries, Hkv, slots].
struct KvRowParams {
  int64_t stride_b, stride_h, stride_s;
  int64_t cache_stride_b, cache_stride_h, cache_stride_s;
  int64_t scale_stride_b, scale_stride_h, scale_stride_s;
  int32_t head_dim;
  int32_t is_wide;  // every row, new or cached, starts on 16 bytes and is a multiple of them long
};

struct KvAppendParams {
  KvRowParams key, value;
  RotaryParams rotary;
  int64_t position;  // new token i of sequence b goes to slot seqlens[b] + position + i
  int64_t capacity;  // slots that a sequence can address
  int64_t block_table_stride_b;
  int64_t num_entries;  // of the cache: sequences, or pages
  int64_t entry_slots;  // of an entry
};

struct RotaryEmbeddingParams {
  RotaryParams rotary;
  int64_t x_stride_b, x_stride_h, x_stride_s;  // x, out [B, H, S, D]
  int64_t out_stride_b, out_stride_h, out_stride_s;
  int64_t position;
  int32_t head_dim;
  int32_t is_wide;
  int32_t is_advancing;  // row i stands i positions further
  int32_t padding;
};

// Beside those of AttnBuffer that say the same: caches are key and value, rotary_embedding reads query
// and writes out.
enum KvBuffer {
  kNewKeyBuffer = 21,
  kNewValueBuffer = 22,
  kCosBuffer = 23,
  kSinBuffer = 24,
};

// Function constants, all bool.
enum KvConstant {
  kHasSeqlensConstant = 16,
  kHasLeftpadConstant = 17,
  kHasBatchIdxConstant = 18,
  kHasBlockTableConstant = 19,
  kIsInt8Constant = 20,
  kHasRotaryConstant = 21,
  kIsInterleavedConstant = 22,
  kHasFloatTableConstant = 23,  // cos and sin are float32, whatever the rows are
};

#define FLASH_MPS_KV_APPEND_PARAMS_SIZE 224
#define FLASH_MPS_ROTARY_EMBEDDING_PARAMS_SIZE 96

static_assert(
    sizeof(KvAppendParams) == FLASH_MPS_KV_APPEND_PARAMS_SIZE, "KvAppendParams: layout changed");
static_assert(
    sizeof(RotaryEmbeddingParams) == FLASH_MPS_ROTARY_EMBEDDING_PARAMS_SIZE,
    "RotaryEmbeddingParams: layout changed");

}  // namespace flash_mps
