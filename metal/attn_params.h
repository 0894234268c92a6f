// The contract between the attention kernels and their host code: one parameter block, the buffer
// slots and the function-constant ids. Read by MSL and by C++ alike.
//
// block_q and block_k (BQ, BK in MSL) are the tile rows and columns that the FlashAttention paper
// calls Br and Bc. Strides count elements; the last dimension of every tensor is dense.
#pragma once

#ifdef __METAL_VERSION__
#include <metal_stdlib>
#else
#include <cstddef>
#include <cstdint>
#endif

namespace flash_mps {

// Numbers only: a value here never changes the code of a kernel.
struct AttnParams {
  int64_t q_stride_b, q_stride_h, q_stride_s;              // query [B, Hq, Sq, D]
  int64_t k_stride_b, k_stride_h, k_stride_s;              // key [B, Hkv, Sk, D]
  int64_t v_stride_b, v_stride_h, v_stride_s;              // value [B, Hkv, Sk, Dv]
  int64_t out_stride_b, out_stride_h, out_stride_s;        // out [B, Hq, Sq, Dv]
  int64_t mask_stride_b, mask_stride_h, mask_stride_q, mask_stride_k;  // 0 where it broadcasts

  int32_t num_heads_q;
  int32_t group_size;           // query heads that share one KV head
  int32_t seqlen_q, seqlen_k;
  int32_t head_dim, head_dim_v;
  int32_t first_q_block;        // of this dispatch: long work is split over several
  int32_t band_begin;           // query i sees keys i + band_begin <= j < i + band_end,
  int32_t band_end;             //   causal masks, windows and their absence alike
  int32_t k_is_wide, v_is_wide;  // every row starts on 16 bytes and is a multiple of 16 bytes long
  float softmax_scale_log2;  // scale * log2(e): scores are kept in base 2
};

#define FLASH_MPS_ATTN_PARAMS_SIZE 176

enum AttnBuffer {
  kQueryBuffer = 0,
  kKeyBuffer = 1,
  kValueBuffer = 2,
  kOutBuffer = 3,
  kLseBuffer = 4,
  kParamsBuffer = 5,
  kMaskBuffer = 6,
};

enum AttnConstant {
  kMaskKindConstant = 0,
  kHasLseConstant = 1,
};

// Value of the constant kMaskKindConstant.
enum MaskKind {
  kNoMask = 0,
  kBoolMask = 1,  // one byte an element, any non-zero byte means visible
  kSameMask = 2,  // added to the score; element type of the query
  kFloatMask = 3,  // added to the score; float32
};

static_assert(sizeof(AttnParams) == FLASH_MPS_ATTN_PARAMS_SIZE, "AttnParams: layout changed");

}  // namespace flash_mps
