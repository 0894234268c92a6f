// One entry of the batch: its lengths, what its queries see, where its rows lie. Kernels ask this for a
// length or a place, not their parameters.
#pragma once

#include "attn_params.h"
#include "mask.h"

namespace flash_mps {

struct Sequence {
  int batch_idx;
  Band band;
};

inline Sequence sequence_of(constant AttnParams& params, int batch_idx) {
  Sequence sequence;
  sequence.batch_idx = batch_idx;
  sequence.band = band_of(params);
  return sequence;
}

// The number of a query's row among those of all heads and entries, as lse and delta have them.
inline int64_t lse_row(constant AttnParams& params, Sequence sequence, int head_idx, int q_idx) {
  return (int64_t(sequence.batch_idx) * params.num_heads_q + head_idx) * params.seqlen_q + q_idx;
}

}  // namespace flash_mps
