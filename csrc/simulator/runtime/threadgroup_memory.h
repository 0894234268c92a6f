// The threadgroup memory of one worker.
#pragma once

#include <string>
#include <vector>

#include "compiler.h"
#include "kernel_abi.h"

namespace sim {

struct ThreadgroupArray {
  std::string name;
  uint32_t begin = 0, bytes = 0;   // in the arena; 0 bytes: not placed yet
  uint32_t threadgroup = 0;        // the last one that used it
};

class ThreadgroupMemory {
 public:
  ThreadgroupMemory();
  ~ThreadgroupMemory();
  ThreadgroupMemory(const ThreadgroupMemory&) = delete;
  ThreadgroupMemory& operator=(const ThreadgroupMemory&) = delete;

  // A new dispatch: no arrays. `reserved` bytes belong to slots of the host, used or not.
  void begin_dispatch(const KernelInfo& info, uint32_t reserved);
  void begin_threadgroup() { ++threadgroup_; }

  // Null when the arrays together exceed what a threadgroup may have.
  void* place(uint32_t id, uint32_t bytes, uint32_t alignment, const char* name);
  uint32_t bytes_used() const { return bytes_used_; }

 private:
  char* arena_;
  const KernelInfo* info_ = nullptr;
  std::vector<ThreadgroupArray> arrays_;
  uint32_t arena_used_ = 0, bytes_used_ = 0;
  uint32_t threadgroup_ = 0;
};

}  // namespace sim
