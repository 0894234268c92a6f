#include "visibility.h"

#include <algorithm>

namespace flash_mps {

KeyBand key_band(const AttnProblem& problem) {
  // No query is beyond seqlen_q, no key beyond seqlen_k.
  const int64_t left = std::min(problem.window_left, problem.seqlen_q + problem.seqlen_k);
  const int64_t right = problem.is_causal ? 0 : problem.window_right;
  if (problem.packed.has_value()) {
    const int64_t farthest = problem.seqlen_q + problem.seqlen_k;
    return {.begin = left < 0 ? -farthest : -left,
            .end = right < 0 ? farthest : std::min(right, farthest) + 1};
  }
  return {
      .begin =
          left < 0 ? -problem.seqlen_q : std::max(problem.causal_offset - left, -problem.seqlen_q),
      .end = right < 0 || right >= problem.seqlen_k - problem.causal_offset
                 ? problem.seqlen_k
                 : problem.causal_offset + right + 1,
  };
}

int64_t visible_pairs(const AttnProblem& problem, int64_t first, int64_t last) {
  if (problem.packed.has_value()) {
    return (last - first) * std::clamp<int64_t>(problem.packed->max_seqlen_k, 0, problem.seqlen_k);
  }
  // Keys before i + end, over all queries: a ramp between two flat parts.
  const auto keys_before = [&](int64_t end) {
    const int64_t ramp_first = std::clamp(-end, first, last);
    const int64_t ramp_last = std::clamp(problem.seqlen_k - end, ramp_first, last);
    const int64_t ramp = (ramp_last - ramp_first) * (ramp_first + ramp_last - 1 + 2 * end) / 2;
    return ramp + (last - ramp_last) * problem.seqlen_k;
  };
  const auto [begin, end] = key_band(problem);
  return keys_before(end) - keys_before(begin);
}

}  // namespace flash_mps
