// The stacks of one worker's fibres: one region of address space, committed as it is used.
#pragma once

#include <vector>

#include "kernel_abi.h"
#include "zero_pages.h"

namespace sim {

class FibreStacks {
 public:
  FibreStacks();

  // The record at the bottom of a stack that no fibre runs on.
  Thread* take();
  void give_back(Thread* thread) { free_.push_back(thread); }
  // All fibres were abandoned: every stack is free again.
  void reclaim();

  // Where a fibre on the stack of `thread` starts.
  void* top(const Thread* thread) const;
  uintptr_t begin() const { return begin_; }
  uintptr_t end() const { return begin_ + kMaxThreadsPerThreadgroup * kStackBytes; }
  bool is_guard(uintptr_t address) const;

 private:
  Thread* record(uint32_t index) const {
    return reinterpret_cast<Thread*>(begin_ + index * kStackBytes);
  }

  const ZeroPages pages_;
  const uintptr_t begin_;
  const uintptr_t page_bytes_;
  uint32_t num_made_ = 0;
  std::vector<Thread*> free_;      // the last one given back is the warmest
};

}  // namespace sim
