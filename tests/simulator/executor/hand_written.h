// Kernels written by hand against kernel_abi.h, as a compiler would write them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "executor.h"

using namespace sim;

constexpr uint32_t kThreads = 64;
constexpr uint32_t kElements = 256;
enum Slot : uint32_t { kIn = 0, kOut = 1, kMask = 2 };

template <typename T>
T load(const T* address) {
  Thread* thread = current_thread();
  thread->services->access(thread, address, sizeof(T), false);
  return *address;
}

template <typename T>
void store(T* address, T value) {
  Thread* thread = current_thread();
  thread->services->access(thread, address, sizeof(T), true);
  *address = value;
}

// What every kernel starts from.
struct Context {
  explicit Context(const Launch* launch)
      : thread(current_thread()),
        services(thread->services),
        index(thread->thread_index_in_threadgroup),
        in(static_cast<float*>(launch->buffers[kIn])),
        out(static_cast<float*>(launch->buffers[kOut])),
        mask(static_cast<float*>(launch->buffers[kMask])) {}

  float* shared(uint32_t count = kThreads, uint32_t id = 0) const {
    return static_cast<float*>(
        services->threadgroup_memory(thread, id, 4 * count, 16, id ? "more" : "shared"));
  }
  void barrier(uint32_t flags = kMemThreadgroup, Site site = 0) const {
    services->threadgroup_barrier(thread, flags, site);
  }
  const LaneValue* exchange(const LaneValue& mine = {}, Site site = 0) const {
    return services->exchange(thread, &mine, site);
  }
  bool in_group(uint32_t x) const { return thread->threadgroup_position_in_grid[0] == x; }
  uint32_t grid_index() const { return thread->thread_position_in_grid[0]; }

  Thread* thread;
  const Services* services;
  uint32_t index;
  float *in, *out, *mask;
};

class HandWritten : public Kernel {
 public:
  HandWritten(const char* name, KernelEntry entry, uint32_t max_threads) : entry_(entry) {
    info_.name = name;
    info_.max_total_threads = max_threads;
    info_.buffers = {argument("in", kIn, false), argument("out", kOut, true),
                     argument("mask", kMask, false)};
  }
  const KernelInfo& info() const override { return info_; }
  KernelEntry entry() const override { return entry_; }

 private:
  static BufferArgument argument(const char* name, uint32_t slot, bool is_writable) {
    BufferArgument argument;
    argument.name = name;
    argument.slot = slot;
    argument.is_writable = is_writable;
    argument.is_threadgroup = false;
    return argument;
  }

  KernelInfo info_;
  KernelEntry entry_;
};

inline Dispatch make_dispatch(const char* name, KernelEntry entry, uint32_t grid,
                              uint32_t threadgroup,
                              uint32_t max_threads = kMaxThreadsPerThreadgroup) {
  Dispatch dispatch;
  dispatch.kernel = std::make_shared<HandWritten>(name, entry, max_threads);
  dispatch.threads_per_grid = {grid, 1, 1};
  dispatch.threads_per_threadgroup = {threadgroup, 1, 1};
  return dispatch;
}
