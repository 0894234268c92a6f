// What the workers of one dispatch share.
#pragma once

#include <algorithm>
#include <atomic>
#include <mutex>
#include <numeric>
#include <optional>

#include "buffer_map.h"
#include "device_shadow.h"
#include "executor.h"

namespace sim {

// splitmix64
inline uint64_t next_random(uint64_t& state) {
  uint64_t z = state += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

class DispatchRun {
 public:
  DispatchRun(const Dispatch& dispatch, const ExecutorOptions& options);

  const Dispatch& dispatch;
  const KernelInfo& info;
  const KernelEntry entry;
  const std::optional<uint64_t> shuffle_seed;
  Launch launch;
  Extent threadgroups_per_grid;
  uint64_t num_threadgroups;
  const BufferMap buffers;
  // Given by the pool: threadgroups are numbered through all dispatches, from 1.
  uint32_t first_number = 1;
  DeviceShadow* shadow = nullptr;

  // The next threadgroup's place in the order of execution, or nothing when the dispatch is over.
  std::optional<uint64_t> take_position();
  // Linear index in the grid of the threadgroup that runs at this place.
  uint64_t threadgroup_at(uint64_t position) const {
    return (position * stride_ + first_) % num_threadgroups;
  }

  // Fills in what all threads of the threadgroup with this linear index have in common.
  void place_threadgroup(Thread& thread, uint64_t threadgroup) const;
  // Fills in the rest for the thread with this index in its threadgroup.
  static void place_thread(Thread& thread, uint32_t index);
  // The thread, or group of threads, of a stamp made in the threadgroup with this linear index.
  std::string describe_who(const Thread& thread, Stamp stamp, uint64_t threadgroup) const;

  // Constant tables of the kernel's own binary.
  bool is_in_kernel_image(uintptr_t address);

  // Threadgroups start in order, so those before a faulty one are already running: they go on, and the
  // first fault in execution order is the one that is kept.
  void report(uint64_t position, std::string message);
  bool is_cancelled(uint64_t position) const {
    return position > fault_position_.load(std::memory_order_relaxed);
  }
  std::optional<Fault> fault() const { return fault_; }

 private:
  uint64_t first_ = 0, stride_ = 1;
  std::once_flag image_once_;
  uintptr_t image_begin_ = 0, image_end_ = 0;
  std::atomic<uint64_t> next_position_{0};
  std::atomic<uint64_t> fault_position_{UINT64_MAX};
  std::mutex fault_mutex_;
  std::optional<Fault> fault_;
};

}  // namespace sim
