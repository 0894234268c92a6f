#include "traffic.h"

#include <algorithm>

namespace sim {
namespace {

using Ranges = std::vector<std::pair<uintptr_t, uintptr_t>>;

constexpr size_t kKeptBytes = size_t(64) << 20;

// Appends the runs of ones of a line; a run that continues the last range extends it.
void append_runs(Ranges& ranges, uintptr_t line_begin, uint64_t mask) {
  while (mask) {
    const int first = std::countr_zero(mask);
    const int length = std::countr_one(mask >> first);
    const uintptr_t begin = line_begin + first;
    if (!ranges.empty() && ranges.back().second == begin) {
      ranges.back().second += length;
    } else {
      ranges.emplace_back(begin, begin + length);
    }
    if (first + length == 64) return;
    mask &= ~uint64_t(0) << (first + length);
  }
}

}  // namespace

void Traffic::begin_dispatch(uint64_t num_lines, uint32_t first_threadgroup) {
  // A dispatch that starts the numbers anew must not meet those of the one before.
  if (first_threadgroup < first_threadgroup_ || pages_.bytes() > kKeptBytes) pages_ = ZeroPages();
  lines_ = nullptr;
  num_lines_ = num_lines;
  first_threadgroup_ = first_threadgroup;
}

void Traffic::map() {
  const size_t bytes = num_lines_ * sizeof(Line);
  if (pages_.bytes() < bytes) pages_ = ZeroPages(bytes);
  lines_ = static_cast<Line*>(pages_.data());
  touched_.assign(num_lines_ / kChunkLines + 1, false);
}

const Traffic::Line* Traffic::line_of_dispatch(uint64_t index) const {
  if (!lines_ || !touched_[index / kChunkLines]) return nullptr;
  const Line& line = lines_[index];
  return line.threadgroup < first_threadgroup_ ? nullptr : &line;
}

void Traffic::collect(const std::vector<const Traffic*>& workers, const BufferMap& buffers,
                      Footprint& footprint) {
  const bool is_used = std::any_of(workers.begin(), workers.end(),
                                   [](const Traffic* traffic) { return traffic->lines_; });
  if (!is_used) return;
  for (const BufferRegion& region : buffers.regions()) {
    const uintptr_t first_line = region.begin / kLineBytes;
    const uint64_t count = (region.end - 1) / kLineBytes - first_line + 1;
    for (uint64_t i = 0; i < count; ++i) {
      uint64_t read = 0, written = 0;
      for (const Traffic* traffic : workers) {
        if (const Line* line = traffic->line_of_dispatch(region.first_line + i)) {
          read |= line->read;
          written |= line->written;
        }
      }
      append_runs(footprint.read, (first_line + i) * kLineBytes, read);
      append_runs(footprint.written, (first_line + i) * kLineBytes, written);
    }
  }
}

}  // namespace sim
