// Which device memory a dispatch may touch, and how to name it.
#pragma once

#include <string>
#include <vector>

#include "executor.h"

namespace sim {

// Bindings that overlap, taken together. An access inside a region is inside one of its bindings.
struct BufferRegion {
  uintptr_t begin = 0, end = 0;
  bool is_writable = false;
  bool is_constant = false;     // every binding is
  uint64_t first_line = 0;      // lines of kLineBytes in the regions before this one
  uint64_t first_cell = 0;      // bytes of writable memory in the regions before this one

  bool contains(uintptr_t address, uint32_t bytes) const {
    return address - begin < end - begin && end - address >= bytes;
  }
};

constexpr uintptr_t kLineBytes = 64;

class BufferMap {
 public:
  explicit BufferMap(const Dispatch& dispatch);

  const std::vector<BufferRegion>& regions() const { return regions_; }
  const BufferRegion* find(uintptr_t address, uint32_t bytes) const;
  uint64_t num_lines() const { return num_lines_; }
  uint64_t num_cells() const { return num_cells_; }

  // "byte offset 4096 of slot 2 'v' (4096 bytes)": the binding that the address is in or nearest to.
  std::string describe(uintptr_t address) const;
  // "slot 4 'mask' is not bound", when the address is a small offset from null; else nothing.
  std::string describe_unbound(uintptr_t address) const;

 private:
  struct Binding {
    uint32_t slot;
    uintptr_t begin, end;
  };

  std::string name_of(uint32_t slot) const;

  const KernelInfo& info_;
  std::vector<Binding> bindings_;
  std::vector<BufferRegion> regions_;
  uint64_t num_lines_ = 0, num_cells_ = 0;
};

}  // namespace sim
