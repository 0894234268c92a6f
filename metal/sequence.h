// One entry of the batch: its lengths, what its queries see, where its rows lie. Kernels ask this for a
// length or a place, not their parameters.
//
// Packed sequences lie behind each other in the rows of one tensor, [1, H, total, D]; sequence i holds the
// rows cu_seqlens[i] ... cu_seqlens[i + 1] - 1. Only the device knows these numbers, so they are clamped
// to the tensor: wrong ones give wrong results, but reach no other memory. What lies before the first
// and after the last sequence is slack: rows that see nothing, so that their results are 0.
#pragma once

#include "attn_params.h"
#include "mask.h"

namespace flash_mps {

constant bool is_packed [[function_constant(kIsPackedConstant)]];

// Buffers of every kernel that owns blocks of sequences, and what it makes of them.
#define FLASH_MPS_SEQUENCE_BUFFERS                                                            \
  const device int *cu_seqlens_q [[buffer(kCuSeqlensQBuffer), function_constant(is_packed)]], \
      const device int *cu_seqlens_k [[buffer(kCuSeqlensKBuffer), function_constant(is_packed)]]
#define FLASH_MPS_CU_SEQLENS is_packed ? cu_seqlens_q : nullptr, is_packed ? cu_seqlens_k : nullptr

struct Sequence {
  int batch_idx;
  int first_query, first_key;  // rows of its tensors before its own
  bool is_slack;
  Band band;
};

// A block of rows, queries or keys, that one threadgroup owns; none of the sequence's where `first` is
// beyond its length.
struct OwnedBlock {
  Sequence sequence;
  int first;
};

enum BlockOwner { kQueryBlock, kKeyBlock };

// Segment 0 is the slack before the first sequence, segment i holds sequence i - 1, and the last is the
// slack after it.
inline IndexRange rows_of_segment(
    const device int* cu_seqlens, int num_sequences, int total, int segment) {
  IndexRange rows;
  rows.begin = segment == 0 ? 0 : metal::clamp(cu_seqlens[segment - 1], 0, total);
  rows.end = segment > num_sequences ? total : metal::clamp(cu_seqlens[segment], rows.begin, total);
  return rows;
}

// The first of a segment's blocks among those of all segments: each gets one block more than it fills
// whole, so that no lengths have to be summed.
template <int SIZE>
inline int first_block_of_segment(const device int* cu_seqlens, int total, int segment) {
  const int begin = segment == 0 ? 0 : metal::clamp(cu_seqlens[segment - 1], 0, total);
  return begin / SIZE + segment;
}

template <int SIZE>
inline int segment_of_block(
    const device int* cu_seqlens, int num_sequences, int total, int block_idx) {
  int segment = 0;
  int end = num_sequences + 2;
  while (end - segment > 1) {
    const int middle = (segment + end) / 2;
    const bool is_before = first_block_of_segment<SIZE>(cu_seqlens, total, middle) <= block_idx;
    segment = is_before ? middle : segment;
    end = is_before ? end : middle;
  }
  return segment;
}

// What the queries of a packed sequence of these lengths see.
inline Band band_of_lengths(constant AttnParams& params, int seqlen_q, int seqlen_k) {
  Band band = band_of(params);
  band.seqlen_q = seqlen_q;
  band.seqlen_k = seqlen_k;
  band.offset = params.is_bottom_right != 0 ? seqlen_k - seqlen_q : 0;
  band.begin += band.offset;
  band.end += band.offset;
  return band;
}

// Block `block_idx` of SIZE rows; of batch entry batch_idx, or of all packed sequences.
template <BlockOwner OWNER, int SIZE>
inline OwnedBlock owned_block(
    constant AttnParams& params,
    const device int* cu_seqlens_q,
    const device int* cu_seqlens_k,
    int block_idx,
    int batch_idx) {
  OwnedBlock own;
  if (!is_packed) {
    own.sequence.batch_idx = batch_idx;
    own.sequence.first_query = 0;
    own.sequence.first_key = 0;
    own.sequence.is_slack = false;
    own.sequence.band = band_of(params);
    own.first = block_idx * SIZE;
    return own;
  }
  const int count = params.num_sequences;
  const device int* cu_seqlens = OWNER == kQueryBlock ? cu_seqlens_q : cu_seqlens_k;
  const int total = OWNER == kQueryBlock ? params.seqlen_q : params.seqlen_k;
  const int segment = segment_of_block<SIZE>(cu_seqlens, count, total, block_idx);
  const IndexRange queries = rows_of_segment(cu_seqlens_q, count, params.seqlen_q, segment);
  const IndexRange keys = rows_of_segment(cu_seqlens_k, count, params.seqlen_k, segment);
  const bool is_slack = segment == 0 || segment > count;
  const int seqlen_q = is_slack && OWNER == kKeyBlock ? 0 : queries.end - queries.begin;
  const int seqlen_k = is_slack && OWNER == kQueryBlock ? 0 : keys.end - keys.begin;
  own.sequence.batch_idx = is_slack ? 0 : segment - 1;
  own.sequence.first_query = queries.begin;
  own.sequence.first_key = keys.begin;
  own.sequence.is_slack = is_slack;
  own.sequence.band = band_of_lengths(params, seqlen_q, seqlen_k);
  own.first = (block_idx - first_block_of_segment<SIZE>(cu_seqlens, total, segment)) * SIZE;
  return own;
}

// The number of a query's row among those of all heads and entries, as lse and delta have them.
inline int64_t lse_row(constant AttnParams& params, Sequence sequence, int head_idx, int q_idx) {
  const int entry = is_packed ? 0 : sequence.batch_idx;
  return (int64_t(entry) * params.num_heads_q + head_idx) * params.seqlen_q + sequence.first_query +
         q_idx;
}

}  // namespace flash_mps
