// The threadgroup memory of one worker, and what each of its bytes has seen.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "compiler.h"
#include "memory_order.h"
#include "zero_pages.h"

namespace sim {

struct ThreadgroupArray {
  std::string name;
  uint32_t begin = 0, bytes = 0;   // in the arena; 0 bytes: not placed yet
  uint32_t threadgroup = 0;        // the last one that used it
};

class ThreadgroupMemory {
 public:
  enum class Finding { Clean, OutsideArray, NeverWritten, RaceWithWrite, RaceWithRead };
  struct Detail {
    uint32_t offset = 0;           // in the arena
    Stamp other = 0;               // the access that this one races with
  };

  ThreadgroupMemory();

  // A new dispatch: no arrays. `reserved` bytes belong to slots of the host, used or not.
  void begin_dispatch(const KernelInfo& info, uint32_t reserved);
  void begin_threadgroup();
  MemoryOrder& order() { return order_; }

  // Null when the arrays together exceed what a threadgroup may have.
  void* place(uint32_t id, uint32_t bytes, uint32_t alignment, const char* name);
  uint32_t bytes_used() const { return bytes_used_; }

  bool contains(uintptr_t address) const { return address - arena() < kArenaBytes; }
  // Checks and records an access of the thread with this index.
  Finding access(uintptr_t address, uint32_t bytes, AccessKind kind, uint32_t thread);
  const Detail& detail() const { return detail_; }
  // "byte offset 12 of threadgroup array 'scores' (1024 bytes)"
  std::string describe(uint32_t offset) const;

 private:
  static constexpr uint32_t kArenaBytes = 4 * kMaxThreadgroupBytes;

  uintptr_t arena() const { return reinterpret_cast<uintptr_t>(arena_.data()); }
  char* at(uint32_t offset) const { return static_cast<char*>(arena_.data()) + offset; }
  bool find_array(uint32_t offset, uint32_t bytes);
  template <uint32_t kBytes>
  Finding access_cells(uint32_t offset, AccessKind kind, uint32_t thread);
  Finding access_cell(Stamp& write, Stamp& read, AccessKind kind, uint32_t thread);

  ZeroPages arena_;
  ZeroPages shadow_;               // a stamp per byte for writes, then one for reads
  Stamp *writes_, *reads_;
  MemoryOrder order_;
  const KernelInfo* info_ = nullptr;
  std::vector<ThreadgroupArray> arrays_;
  uint32_t array_begin_ = 0, array_end_ = 0;   // of the array accessed last
  uint32_t arena_used_ = 0, bytes_used_ = 0;
  uint32_t threadgroup_ = 0;
  Detail detail_;
};

}  // namespace sim
