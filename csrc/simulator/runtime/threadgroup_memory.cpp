#include "threadgroup_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace sim {
namespace {

// Arrays lie apart, so that running off the end of one does not land in the next.
constexpr uint32_t kGapBytes = 256;
constexpr uint32_t kArenaBytes = 4 * kMaxThreadgroupBytes;

}  // namespace

ThreadgroupMemory::ThreadgroupMemory() {
  void* mapping = mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  arena_ = static_cast<char*>(mapping);
}

ThreadgroupMemory::~ThreadgroupMemory() { munmap(arena_, kArenaBytes); }

void ThreadgroupMemory::begin_dispatch(const KernelInfo& info, uint32_t reserved) {
  info_ = &info;
  arrays_.clear();
  arena_used_ = kGapBytes;
  bytes_used_ = reserved;
}

void* ThreadgroupMemory::place(uint32_t id, uint32_t bytes, uint32_t alignment, const char* name) {
  if (id >= arrays_.size()) arrays_.resize(id + 1);
  ThreadgroupArray& array = arrays_[id];
  if (array.threadgroup == threadgroup_) return arena_ + array.begin;
  if (array.bytes == 0) {
    const auto& arguments = info_->buffers;
    const bool is_slot = std::any_of(arguments.begin(), arguments.end(), [&](const auto& argument) {
      return argument.is_threadgroup && argument.name == name;
    });
    if (!is_slot) bytes_used_ += bytes;
    const uint32_t begin = (arena_used_ + alignment - 1) & ~(alignment - 1);
    if (bytes_used_ > kMaxThreadgroupBytes || begin + bytes + kGapBytes > kArenaBytes) {
      return nullptr;
    }
    array = {name, begin, bytes, 0};
    arena_used_ = begin + bytes + kGapBytes;
  }
  array.threadgroup = threadgroup_;
  std::memset(arena_ + array.begin, 0xFF, array.bytes);   // what a kernel must not rely on
  return arena_ + array.begin;
}

}  // namespace sim
