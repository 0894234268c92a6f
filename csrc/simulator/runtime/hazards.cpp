#include "hazards.h"

#include <algorithm>

namespace sim {
namespace {

std::optional<std::pair<uintptr_t, uintptr_t>> overlap(const Ranges& a, const Ranges& b) {
  for (auto i = a.begin(), j = b.begin(); i != a.end() && j != b.end();) {
    const uintptr_t begin = std::max(i->first, j->first), end = std::min(i->second, j->second);
    if (begin < end) return std::pair{begin, end};
    i->second < j->second ? ++i : ++j;
  }
  return std::nullopt;
}

void subtract(Ranges& ranges, uintptr_t begin, uintptr_t end) {
  Ranges rest;
  for (const auto& [first, last] : ranges) {
    if (first < std::min(last, begin)) rest.emplace_back(first, std::min(last, begin));
    if (std::max(first, end) < last) rest.emplace_back(std::max(first, end), last);
  }
  ranges = std::move(rest);
}

std::string describe(const std::string& first, const std::string& second, const char* how,
                     size_t bytes) {
  return "concurrent encoder: kernel '" + second + "' " + how + " " + std::to_string(bytes) +
         " bytes that kernel '" + first +
         "' of the same encoder also touches, and no memoryBarrier lies between them";
}

}  // namespace

Accesses accesses_of(const Dispatch& dispatch, const Outcome& outcome) {
  if (!outcome.footprint.read.empty() || !outcome.footprint.written.empty()) {
    return {outcome.footprint.read, outcome.footprint.written};
  }
  Accesses accesses;
  for (const auto& argument : dispatch.kernel->info().buffers) {
    if (argument.is_threadgroup || argument.slot >= kMaxBuffers) continue;
    const auto& bound = dispatch.buffers[argument.slot];
    if (!bound.contents) continue;
    const auto begin = reinterpret_cast<uintptr_t>(bound.contents) + bound.offset;
    (argument.is_writable ? accesses.written : accesses.read).emplace_back(begin, begin + 1);
  }
  std::sort(accesses.read.begin(), accesses.read.end());
  std::sort(accesses.written.begin(), accesses.written.end());
  return accesses;
}

std::optional<std::string> HazardTracker::add(const std::string& kernel, Accesses accesses) {
  for (const auto& [earlier, touched] : since_barrier_) {
    if (auto hit = overlap(touched.written, accesses.written)) {
      return describe(earlier, kernel, "writes", hit->second - hit->first);
    }
    if (auto hit = overlap(touched.written, accesses.read)) {
      return describe(earlier, kernel, "reads", hit->second - hit->first);
    }
    if (auto hit = overlap(touched.read, accesses.written)) {
      return describe(earlier, kernel, "writes", hit->second - hit->first);
    }
  }
  since_barrier_.push_back({kernel, std::move(accesses)});
  return std::nullopt;
}

void HazardTracker::clear(uintptr_t begin, uintptr_t end) {
  for (auto& entry : since_barrier_) {
    subtract(entry.accesses.read, begin, end);
    subtract(entry.accesses.written, begin, end);
  }
}

}  // namespace sim
