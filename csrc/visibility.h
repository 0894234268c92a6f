// Which pairs positions alone let see each other: causal masks and windows, as metal/mask.h has them.
#pragma once

#include "attn_args.h"

namespace flash_mps {

// Query i sees keys i + begin <= j < i + end; of a packed sequence, beside its own causal_offset.
struct KeyBand {
  int64_t begin, end;
};

KeyBand key_band(const AttnProblem& problem);

// Visible (query, key) pairs of one head for queries first ... last - 1, before any mask; of packed
// sequences, whose lengths only the device knows, at most so many.
int64_t visible_pairs(const AttnProblem& problem, int64_t first, int64_t last);

}  // namespace flash_mps
