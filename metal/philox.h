// Random words by counter, for MSL and C++ alike: Philox 4x32-10 (Salmon et al. 2011, "Parallel random
// numbers: as easy as 1, 2, 3"). A word is a function of its key and counter alone, so that nothing is
// stored and every kernel finds the same one.
#pragma once

#ifdef __METAL_VERSION__
#include <metal_stdlib>
#else
#include <cstdint>
#endif

namespace flash_mps {

struct PhiloxKey {
  uint32_t low;
  uint32_t high;
};

struct PhiloxWords {
  uint32_t words[4];
};

inline PhiloxWords philox(PhiloxKey key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t even = uint64_t(0xD2511F53u) * c0;
    const uint64_t odd = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(odd >> 32) ^ c1 ^ key.low;
    c1 = uint32_t(odd);
    c2 = uint32_t(even >> 32) ^ c3 ^ key.high;
    c3 = uint32_t(even);
    key.low += 0x9E3779B9u;
    key.high += 0xBB67AE85u;
  }
  PhiloxWords result;
  result.words[0] = c0;
  result.words[1] = c1;
  result.words[2] = c2;
  result.words[3] = c3;
  return result;
}

// The words of query q_idx and keys k_idx, k_idx + 1, ... of one head, k_idx a multiple of 4. head_idx
// counts the heads of all batch entries. A pair is dropped when its word is below dropout_p * 2^32.
inline PhiloxWords dropout_words(PhiloxKey key, uint32_t head_idx, uint32_t q_idx, uint32_t k_idx) {
  return philox(key, k_idx / 4, q_idx, head_idx, 0);
}

}  // namespace flash_mps
