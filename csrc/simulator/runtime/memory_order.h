// Which accesses of the threads of one threadgroup are ordered by the barriers between them, for one
// kind of memory. An access is remembered as a stamp: when it happened, and who made it.
#pragma once

#include <array>

#include "kernel_abi.h"

namespace sim {

enum class AccessKind : uint32_t { Read, Write, Atomic };

using Stamp = uint32_t;  // epoch << kWhoBits | who; 0: no access

constexpr uint32_t kWhoBits = 11;
constexpr uint32_t kWhoMask = (1u << kWhoBits) - 1;
// Who: a thread's index in its threadgroup, or
constexpr uint32_t kSeveralOfSimdgroup = kMaxThreadsPerThreadgroup;  // + index of the simdgroup
constexpr uint32_t kSeveralSimdgroups = kSeveralOfSimdgroup + 32;
constexpr uint32_t kSeveralThreadgroups = kSeveralSimdgroups + 1;
constexpr uint32_t kAtomics = kSeveralThreadgroups + 1;

inline uint32_t who(Stamp stamp) {
  return stamp & kWhoMask;
}

// The simdgroup of whoever made the access; none for wider groups.
inline uint32_t simdgroup_of(Stamp stamp) {
  const uint32_t w = who(stamp);
  return w < kSeveralOfSimdgroup ? w / kSimdWidth : w - kSeveralOfSimdgroup;
}

class MemoryOrder {
 public:
  // True when the clock has run so far that old stamps must be forgotten: clear them all.
  bool begin_threadgroup() {
    const bool wraps = clock_ > kLastEpoch / 2;
    if (wraps) clock_ = 0;
    threadgroup_barrier();
    start_ = window_;
    return wraps;
  }
  void threadgroup_barrier() {
    tick();
    window_ = clock_ == kLastEpoch ? ~0u : clock_ << kWhoBits;
    simdgroup_start_.fill(clock_ << kWhoBits);
  }
  void simdgroup_barrier(uint32_t simdgroup) {
    tick();
    if (clock_ == kLastEpoch) window_ = ~0u;  // out of epochs: takes everything as ordered
    simdgroup_start_[simdgroup] = clock_ << kWhoBits;
  }

  // Of an access that `thread` makes now.
  Stamp stamp(uint32_t thread) const { return simdgroup_start_[thread / kSimdWidth] | thread; }
  Stamp atomic_stamp(uint32_t thread) const {
    return simdgroup_start_[thread / kSimdWidth] | kAtomics;
  }
  bool is_of_this_threadgroup(Stamp stamp) const { return stamp >= start_; }
  bool is_before(Stamp old, uint32_t thread) const {
    if (old < window_ || who(old) == thread) return true;
    const uint32_t simdgroup = thread / kSimdWidth;
    return simdgroup_of(old) == simdgroup && old < simdgroup_start_[simdgroup];
  }
  // What stands for all reads of one byte so far, after `thread` has read it too.
  Stamp merge_read(Stamp old, uint32_t thread) const {
    if (old < window_ || who(old) == thread) return stamp(thread);
    const uint32_t simdgroup = thread / kSimdWidth;
    if (simdgroup_of(old) != simdgroup) return window_ | kSeveralSimdgroups;
    const Stamp start = simdgroup_start_[simdgroup];
    return old < start ? stamp(thread) : start | (kSeveralOfSimdgroup + simdgroup);
  }

 private:
  static constexpr uint32_t kLastEpoch = (1u << (32 - kWhoBits)) - 1;

  void tick() {
    if (clock_ < kLastEpoch) ++clock_;
  }

  uint32_t clock_ = 0;
  Stamp start_ = 0;  // of this threadgroup
  Stamp window_ = 0;  // of the time since the last threadgroup barrier
  std::array<Stamp, kMaxThreadsPerThreadgroup / kSimdWidth> simdgroup_start_{};
};

}  // namespace sim
