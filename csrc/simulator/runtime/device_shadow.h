// Who read and wrote each byte of the writable device memory of a dispatch. Shared by its workers.
#pragma once

#include <atomic>
#include <mutex>

#include "memory_order.h"
#include "zero_pages.h"

namespace sim {

struct Access {
  Stamp stamp = 0;
  uint32_t threadgroup = 0;        // its number among all dispatches
  bool is_write = false;
  explicit operator bool() const { return stamp != 0; }
};

class DeviceShadow {
 public:
  void begin_dispatch(uint64_t num_cells, uint32_t first_threadgroup);

  // Records an access to the byte of this cell. Returns an earlier one that is not ordered before it.
  Access read(uint64_t cell, uint32_t threadgroup, uint32_t thread, const MemoryOrder& order);
  Access write(uint64_t cell, uint32_t threadgroup, uint32_t thread, const MemoryOrder& order);
  Access update(uint64_t cell, uint32_t threadgroup, uint32_t thread, const MemoryOrder& order);

 private:
  using Cell = std::atomic<uint64_t>;  // number of the threadgroup << 32 | stamp; old numbers: free

  Cell* cells() {
    Cell* mapped = cells_.load(std::memory_order_acquire);
    return mapped ? mapped : map();
  }
  Cell* map();
  Access conflict(uint64_t old, bool is_write, uint32_t threadgroup, uint32_t thread,
                  const MemoryOrder& order) const;
  Access conflict_with_reads(uint64_t cell, uint32_t threadgroup, uint32_t thread,
                             const MemoryOrder& order);

  std::mutex mutex_;
  ZeroPages pages_;
  std::atomic<Cell*> cells_{nullptr};  // of writes, then as many of reads
  std::atomic<bool> has_reads_{false};
  uint64_t num_cells_ = 0;
  uint32_t first_threadgroup_ = 0;
};

}  // namespace sim
