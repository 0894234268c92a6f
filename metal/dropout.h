// Dropout of probabilities: pairs (query, key) lose their weight at random, the others are scaled. Which,
// is computed where it is needed, in forward and backward alike; nothing is stored.
#pragma once

#include "attn_params.h"
#include "mask.h"
#include "philox.h"
#include "tile.h"

namespace flash_mps {

constant bool has_dropout [[function_constant(kHasDropoutConstant)]];

// The random numbers of one head.
struct Dropout {
  PhiloxKey key;
  uint head_idx;  // over all batch entries
};

inline Dropout dropout_of(constant AttnParams& params, int batch_idx, int head_idx) {
  Dropout dropout;
  dropout.key.low = params.dropout_key_low;
  dropout.key.high = params.dropout_key_high;
  dropout.head_idx = uint(batch_idx * params.num_heads_q + head_idx);
  return dropout;
}

inline uint word_of_key(PhiloxWords random, int k_idx) {
  const uint even = (k_idx & 2) != 0 ? random.words[2] : random.words[0];
  const uint odd = (k_idx & 2) != 0 ? random.words[3] : random.words[1];
  return (k_idx & 1) != 0 ? odd : even;
}

// Multiplies each pair of a strip, of P or of dP, by 0 or by 1 / (1 - dropout_p).
template <bool TRANSPOSED, int COUNT>
inline void apply_dropout(
    thread Strip<float, COUNT>& strip,
    constant AttnParams& params,
    Dropout dropout,
    int q_start,
    int k_start,
    LanePosition at) {
  if (!has_dropout) {
    return;
  }
  FLASH_MPS_UNROLL
  for (int j = 0; j < COUNT; ++j) {
    float2 values = elements(strip.fragments[j]);
    for (int i = 0; i < 2; ++i) {
      const ScorePosition position = score_position<TRANSPOSED>(q_start, k_start, at, j, i);
      const PhiloxWords random = dropout_words(
          dropout.key, dropout.head_idx, uint(position.q_idx), uint(position.k_idx) & ~3u);
      const bool is_kept = word_of_key(random, position.k_idx) >= params.dropout_threshold;
      values[i] = is_kept ? values[i] * params.dropout_scale : 0.0f;
    }
    elements(strip.fragments[j]) = values;
  }
}

}  // namespace flash_mps
