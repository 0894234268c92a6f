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
  int64_t alibi_stride_b;  // alibi_slopes [B, Hq]; 0 for [Hq]
  // block_classes [B, Hq, blocks of queries, blocks of keys]; 0 where it broadcasts
  int64_t class_stride_b, class_stride_h, class_stride_q, class_stride_k;

  int32_t num_heads_q;
  int32_t group_size;           // query heads that share one KV head
  int32_t seqlen_q, seqlen_k;
  int32_t head_dim, head_dim_v;
  int32_t first_q_block;        // of this dispatch: long work is split over several
  int32_t band_begin;           // query i sees keys i + band_begin <= j < i + band_end,
  int32_t band_end;             //   causal masks, windows and their absence alike
  int32_t causal_offset;        // query i stands at key i + causal_offset
  // Packed sequences: seqlen_q and seqlen_k are those of all together, and the band lies around each
  // sequence's own causal_offset, its seqlen_k - seqlen_q, or 0.
  int32_t num_sequences;
  int32_t is_bottom_right;
  int32_t k_is_wide, v_is_wide;  // every row starts on 16 bytes and is a multiple of 16 bytes long
  float softmax_scale;
  float softcap;
  uint32_t dropout_threshold;  // a pair whose random word is below is dropped
  float dropout_scale;  // of the others
  uint32_t dropout_key_low, dropout_key_high;
};

#define FLASH_MPS_ATTN_PARAMS_SIZE 248

// Of the backward kernels. Gradients and lse, delta [B, Hq, Sq] are those of all query heads and batch
// entries; dK and dV have the shapes of key and value.
struct AttnBwdParams {
  AttnParams fwd;  // out_stride_* are those of out
  int64_t dout_stride_b, dout_stride_h, dout_stride_s, dout_stride_d;
  int64_t dq_stride_b, dq_stride_h, dq_stride_s;
  int64_t dk_stride_b, dk_stride_h, dk_stride_s;
  int64_t dv_stride_b, dv_stride_h, dv_stride_s;
  int64_t dmask_stride_b, dmask_stride_h, dmask_stride_q;  // 0 where it broadcasts

  int32_t batch;
  int32_t first_k_block;  // of this dispatch
  int32_t q_is_wide, dout_is_wide;
};

#define FLASH_MPS_ATTN_BWD_PARAMS_SIZE 392

// Of the decode kernel. A row is one query of one head: the num_rows rows that read one KV head are
// numbered query * group_size + head. Keys lie in entries of a cache, one a sequence, or in pages: in
// fwd, k_stride_b and v_stride_b lead from one entry or page to the next.
struct AttnDecodeParams {
  AttnParams fwd;
  // Of an int8 key and value: [entries, Hkv, S].
  int64_t k_scale_stride_b, k_scale_stride_h, k_scale_stride_s;
  int64_t v_scale_stride_b, v_scale_stride_h, v_scale_stride_s;
  int64_t block_table_stride_b;  // [B, pages of a sequence]
  int64_t total_rows;  // of all heads and sequences

  int32_t num_rows;
  int32_t row_tiles;  // of a threadgroup: a power of 2
  int32_t first_row_block;  // of this dispatch
  int32_t num_splits;
  int32_t num_entries;  // of the cache, or pages
  // Rows of the mask from one query, one head to the next; 0: shared.
  int32_t mask_row_q, mask_row_h;
  int32_t page_size;
  int32_t seqlen_new;  // keys of a sequence beyond seqlens
  int32_t has_seqlens, has_leftpad, has_batch_idx;
  int32_t is_causal;
  int32_t window_left, window_right;  // -1: unlimited
};

#define FLASH_MPS_ATTN_DECODE_PARAMS_SIZE 376

// Of the combine pass. The scratch holds O [splits, rows, Dv], then (m, l) [splits, rows, 2], where
// rows counts those of all heads and sequences.
struct AttnCombineParams {
  int64_t out_stride_b, out_stride_h, out_stride_s;
  int32_t num_heads_q;
  int32_t seqlen_q;
  int32_t head_dim_v;
  int32_t num_splits;
  int32_t num_rows;
};

#define FLASH_MPS_ATTN_COMBINE_PARAMS_SIZE 48

// Of the pre-pass over a mask [B, Hq, Sq, Sk], any dimension of which may be 1; block_classes is dense.
struct MaskClassParams {
  int64_t mask_stride_b, mask_stride_h, mask_stride_q, mask_stride_k;
  int32_t num_heads_q;
  int32_t seqlen_q, seqlen_k;
  int32_t num_q_blocks, num_k_blocks;
};

#define FLASH_MPS_MASK_CLASS_PARAMS_SIZE 56

enum AttnBuffer {
  kQueryBuffer = 0,
  kKeyBuffer = 1,
  kValueBuffer = 2,
  kOutBuffer = 3,
  kLseBuffer = 4,
  kParamsBuffer = 5,
  kMaskBuffer = 6,
  // backward
  kDeltaBuffer = 7,
  kDOutBuffer = 8,
  kDLseBuffer = 9,
  kDQueryBuffer = 10,
  kDKeyBuffer = 11,
  kDValueBuffer = 12,
  kDMaskBuffer = 13,
  // decode
  kPartialBuffer = 14,
  kKeyScaleBuffer = 15,
  kValueScaleBuffer = 16,
  kSeqlensBuffer = 17,
  kLeftpadBuffer = 18,
  kBatchIdxBuffer = 19,
  kBlockTableBuffer = 20,
  // user-defined scores, without a cache: the first of ten captured tensors
  kUserTensorBuffer = 15,
  // score modifiers; 21 to 24 are those of kv_cache_params.h
  kAlibiBuffer = 25,
  kSinksBuffer = 26,
  kBlockClassesBuffer = 27,
  // packed sequences
  kCuSeqlensQBuffer = 28,
  kCuSeqlensKBuffer = 29,
  kUserLayoutBuffer = 30,  // size and stride of each dimension of each captured tensor
};

enum AttnConstant {
  kMaskKindConstant = 0,
  kHasLseConstant = 1,
  kIsSplitConstant = 2,  // writes partial results, for the combine pass
  kIsCachedConstant = 3,  // sequences have lengths, left pads and entries of their own
  kIsPagedConstant = 4,  // keys are found through a block table
  kIsQuantizedConstant = 5,  // keys and values are int8 with a scale each
  kHasSoftcapConstant = 6,
  kHasAlibiConstant = 7,
  kHasSinksConstant = 8,
  kHasDropoutConstant = 9,
  kHasBlockClassesConstant = 10,
  kIsPackedConstant = 11,  // sequences lie behind each other in the rows of one tensor
  kHasUserCodeConstant = 12,  // user_score.h is a text of the caller's
};

// Value of the constant kMaskKindConstant.
enum MaskKind {
  kNoMask = 0,
  kBoolMask = 1,  // one byte an element, any non-zero byte means visible
  kSameMask = 2,  // added to the score; element type of the query
  kFloatMask = 3,  // added to the score; float32
};

// What block_classes knows of a mask, for each of its blocks of FLASH_MPS_CLASS_BLOCK queries and as many
// keys: one byte. Every tile of every kernel but flash_decode lies within one block.
enum BlockClass {
  kHiddenBlock = 0,  // no pair is visible
  kMixedBlock = 1,
  kOpenBlock = 2,  // every pair is visible, and what a float mask adds is 0
};

#define FLASH_MPS_CLASS_BLOCK 32

static_assert(sizeof(AttnParams) == FLASH_MPS_ATTN_PARAMS_SIZE, "AttnParams: layout changed");
static_assert(
    sizeof(AttnBwdParams) == FLASH_MPS_ATTN_BWD_PARAMS_SIZE, "AttnBwdParams: layout changed");
static_assert(
    sizeof(AttnDecodeParams) == FLASH_MPS_ATTN_DECODE_PARAMS_SIZE,
    "AttnDecodeParams: layout changed");
static_assert(
    sizeof(AttnCombineParams) == FLASH_MPS_ATTN_COMBINE_PARAMS_SIZE,
    "AttnCombineParams: layout changed");
static_assert(
    sizeof(MaskClassParams) == FLASH_MPS_MASK_CLASS_PARAMS_SIZE, "MaskClassParams: layout changed");

}  // namespace flash_mps
