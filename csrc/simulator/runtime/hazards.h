// Dispatches of a concurrent encoder that touch the same memory without a barrier between them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "executor.h"

namespace sim {

using Ranges = std::vector<std::pair<uintptr_t, uintptr_t>>;   // sorted, half-open

struct Accesses {
  Ranges read, written;
};

// An instrumented dispatch knows what it touched. A plain one is known by the first byte of each
// binding only, which misses overlaps but accuses nobody wrongly.
Accesses accesses_of(const Dispatch& dispatch, const Outcome& outcome);

class HazardTracker {
 public:
  // Adds a dispatch; returns the complaint when it conflicts with an earlier one.
  std::optional<std::string> add(const std::string& kernel, Accesses accesses);
  void clear() { since_barrier_.clear(); }
  void clear(uintptr_t begin, uintptr_t end);

 private:
  struct Entry {
    std::string kernel;
    Accesses accesses;
  };
  std::vector<Entry> since_barrier_;
};

}  // namespace sim
