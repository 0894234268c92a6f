// Judges and counts every memory access of one worker's threads (instrumented kernels only).
#pragma once

#include "buffer_map.h"
#include "device_shadow.h"
#include "threadgroup_memory.h"
#include "traffic.h"

namespace sim {

class DispatchRun;

class AccessChecker {
 public:
  void begin_dispatch(DispatchRun& run);
  void begin_threadgroup(uint64_t threadgroup);
  void threadgroup_barrier(uint32_t memory_flags);
  void simdgroup_barrier(uint32_t simdgroup, uint32_t memory_flags);

  // False for a fault, which describe() puts into words: "reads 4 bytes at ..., which ...".
  inline __attribute__((always_inline)) bool access(const Thread& thread, uintptr_t address,
                                                    uint32_t bytes, AccessKind kind) {
    if (memory_.contains(address)) {
      count(kind, bytes, counters_.threadgroup_bytes_read, counters_.threadgroup_bytes_written);
      finding_ = memory_.access(address, bytes, kind, thread.thread_index_in_threadgroup);
      return finding_ == ThreadgroupMemory::Finding::Clean;
    }
    if (!region_->contains(address, bytes)) {
      if (is_in_simdgroup(thread, address)) return true;
      const BufferRegion* region = buffers_->find(address, bytes);
      if (!region) return is_harmless(thread, address, bytes, kind);
      region_ = region;
    }
    if (region_->is_constant) {
      counters_.constant_bytes_read += bytes;
      traffic_.read(*region_, address, bytes);
      return true;
    }
    count(kind, bytes, counters_.device_bytes_read, counters_.device_bytes_written);
    if (kind != AccessKind::Write) {
      counters_.device_bytes_read_distinct += traffic_.read(*region_, address, bytes);
    }
    if (kind != AccessKind::Read) traffic_.write(*region_, address, bytes);
    return !region_->is_writable || is_ordered(thread, address, bytes, kind);
  }
  std::string describe(const Thread& thread, uintptr_t address, uint32_t bytes,
                       AccessKind kind) const;

  ThreadgroupMemory& memory() { return memory_; }
  const Traffic& traffic() const { return traffic_; }
  const Counters& counters() const { return counters_; }

 private:
  static void count(AccessKind kind, uint32_t bytes, uint64_t& read, uint64_t& written) {
    if (kind != AccessKind::Write) read += bytes;
    if (kind != AccessKind::Read) written += bytes;
  }
  static bool is_in_simdgroup(const Thread& thread, uintptr_t address) {
    return address - reinterpret_cast<uintptr_t>(thread.simdgroup) < sizeof(Simdgroup);
  }
  bool is_ordered(const Thread& thread, uintptr_t address, uint32_t bytes, AccessKind kind);
  bool is_harmless(const Thread& thread, uintptr_t address, uint32_t bytes, AccessKind kind) const;

  DispatchRun* run_ = nullptr;
  const BufferMap* buffers_ = nullptr;
  const BufferRegion* region_ = nullptr;   // of the last access
  ThreadgroupMemory memory_;
  ThreadgroupMemory::Finding finding_ = ThreadgroupMemory::Finding::Clean;
  MemoryOrder device_order_;
  Traffic traffic_;
  Counters counters_;
  uint32_t threadgroup_ = 0;               // its number among all dispatches
  Access race_;                            // with an access to device memory
  uintptr_t race_address_ = 0;
};

}  // namespace sim
