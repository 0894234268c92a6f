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

void Traffic::enter(Line& line) {
  if (line.threadgroup < first_threadgroup_) {
    line.read = line.written = 0;
    touched_[(&line - lines_) / kChunkLines] = true;
  }
  line.threadgroup = threadgroup_;
  line.seen = 0;
}

const Traffic::Line* Traffic::line_of_dispatch(uint64_t index) const {
  if (!has_touched(index / kChunkLines)) return nullptr;
  const Line& line = lines_[index];
  return line.threadgroup < first_threadgroup_ ? nullptr : &line;
}

void Traffic::collect(const std::vector<const Traffic*>& workers, const BufferMap& buffers,
                      Footprint& footprint) {
  const bool is_used = std::any_of(workers.begin(), workers.end(),
                                   [](const Traffic* traffic) { return traffic->lines_; });
  if (!is_used) return;
  for (const BufferRegion& region : buffers.regions()) {
    const uintptr_t address = region.begin / kLineBytes * kLineBytes;
    const uint64_t last = region.first_line + (region.end - 1 - address) / kLineBytes;
    for (uint64_t index = region.first_line; index <= last;) {
      const uint64_t chunk = index / kChunkLines;
      const uint64_t chunk_end = std::min((chunk + 1) * kChunkLines, last + 1);
      const bool is_touched = std::any_of(workers.begin(), workers.end(),
                                          [&](const Traffic* t) { return t->has_touched(chunk); });
      for (; is_touched && index < chunk_end; ++index) {
        uint64_t read = 0, written = 0;
        for (const Traffic* traffic : workers) {
          const Line* line = traffic->line_of_dispatch(index);
          if (!line) continue;
          read |= line->read;
          written |= line->written;
        }
        const uintptr_t line_begin = address + (index - region.first_line) * kLineBytes;
        append_runs(footprint.read, line_begin, read);
        append_runs(footprint.written, line_begin, written);
      }
      index = chunk_end;
    }
  }
}

}  // namespace sim
