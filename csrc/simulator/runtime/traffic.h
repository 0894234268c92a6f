// Which bytes of device memory the threadgroups of one worker read and wrote.
#pragma once

#include <bit>
#include <vector>

#include "buffer_map.h"
#include "executor.h"
#include "zero_pages.h"

namespace sim {

class Traffic {
 public:
  // Threadgroups are numbered through all dispatches, so that nothing needs to be cleared between.
  void begin_dispatch(uint64_t num_lines, uint32_t first_threadgroup);
  void begin_threadgroup(uint32_t number) { threadgroup_ = number; }

  // Returns how many of these bytes the threadgroup has not read before.
  uint32_t read(const BufferRegion& region, uintptr_t address, uint32_t bytes) {
    return for_lines(region, address, bytes, [](Line& line, uint64_t mask) {
      const uint64_t fresh = mask & ~line.seen;
      if (fresh == 0) return 0;
      line.seen |= fresh;
      line.read |= fresh;
      return std::popcount(fresh);
    });
  }
  void write(const BufferRegion& region, uintptr_t address, uint32_t bytes) {
    for_lines(region, address, bytes, [](Line& line, uint64_t mask) {
      line.written |= mask;
      return 0;
    });
  }

  // Adds what all these workers touched to the footprint of the dispatch.
  static void collect(const std::vector<const Traffic*>& workers, const BufferMap& buffers,
                      Footprint& footprint);

 private:
  struct Line {
    uint64_t seen;  // bytes that the threadgroup below has read
    uint64_t read, written;  // by this dispatch
    uint32_t threadgroup;  // the last one here
  };
  static constexpr uint64_t kChunkLines = 128;  // skipped together when untouched

  template <typename Record>
  inline __attribute__((always_inline)) uint32_t for_lines(const BufferRegion& region,
                                                           uintptr_t address, uint32_t bytes,
                                                           Record record) {
    if (!lines_) map();
    Line* line = lines_ + region.first_line + address / kLineBytes - region.begin / kLineBytes;
    uint32_t offset = address % kLineBytes, result = 0;
    for (;; ++line, offset = 0) {
      const uint32_t here = bytes < kLineBytes - offset ? bytes : kLineBytes - offset;
      const uint64_t mask = (~uint64_t(0) >> (kLineBytes - here)) << offset;
      if (line->threadgroup != threadgroup_) enter(*line);
      result += record(*line, mask);
      bytes -= here;
      if (bytes == 0) return result;
    }
  }
  void enter(Line& line);  // on a threadgroup's first access to it
  void map();
  bool has_touched(uint64_t chunk) const { return lines_ && touched_[chunk]; }
  const Line* line_of_dispatch(uint64_t index) const;

  ZeroPages pages_;
  Line* lines_ = nullptr;  // null until the dispatch touches device memory
  std::vector<uint8_t> touched_;  // per chunk
  uint64_t num_lines_ = 0;
  uint32_t first_threadgroup_ = 0, threadgroup_ = 0;
};

}  // namespace sim
