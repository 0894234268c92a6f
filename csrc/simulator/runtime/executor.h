// Runs the threadgroups of one dispatch: threads as fibres, threadgroups spread over cores, with
// the checks and the counters of checked mode.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "compiler.h"
#include "kernel_abi.h"

namespace sim {

struct BoundBuffer {
  void* contents = nullptr;    // first byte of the MTLBuffer; null when the slot is unbound
  uint64_t length = 0;         // bytes of the MTLBuffer
  uint64_t offset = 0;         // byte offset of the binding
  std::string label;           // for messages; may be empty
};

struct Extent {
  uint32_t x = 1, y = 1, z = 1;
};

struct Dispatch {
  std::shared_ptr<const Kernel> kernel;
  std::array<BoundBuffer, kMaxBuffers> buffers;
  std::array<uint32_t, kMaxBuffers> threadgroup_bytes{};
  Extent threads_per_grid;  // dispatchThreadgroups: threadgroups x threads per threadgroup
  Extent threads_per_threadgroup;  // a last threadgroup may be partial (dispatchThreads:)
};

// Sums over one dispatch. Byte counts are 0 for a Plain kernel.
struct Counters {
  std::string kernel;
  uint64_t threadgroups = 0;
  uint64_t matrix_products = 0;  // 8x8x8, per simdgroup
  uint64_t exponentials = 0;  // per thread and element
  uint64_t threadgroup_barriers = 0;  // per threadgroup
  uint64_t simdgroup_barriers = 0;  // per simdgroup
  uint64_t shuffles = 0;  // shuffles, reductions and votes, per simdgroup
  uint64_t device_bytes_read = 0;  // requested, summed over threads
  uint64_t device_bytes_written = 0;
  uint64_t device_bytes_read_distinct =
      0;  // distinct bytes per threadgroup, summed over threadgroups
  uint64_t device_bytes_footprint =
      0;  // distinct bytes read + distinct bytes written; constant too
  uint64_t constant_bytes_read = 0;  // requested, summed over threads
  uint64_t threadgroup_bytes_read = 0;
  uint64_t threadgroup_bytes_written = 0;
};

struct Fault {
  std::string kernel;
  std::string message;  // complete sentence: kernel, thread, slot, byte offset, what and why
};

struct ExecutorOptions {
  std::optional<uint64_t> shuffle_seed;  // order of threads and threadgroups; unset: ascending
  uint32_t num_workers = 0;  // 0: one per core
};

// A range of device memory that the dispatch touched, for the hazard check of concurrent encoders.
struct Footprint {
  std::vector<std::pair<uintptr_t, uintptr_t>> read, written;  // merged half-open host ranges
};

struct Outcome {
  Counters counters;
  std::optional<Fault> fault;
  Footprint footprint;  // filled for instrumented kernels
};

// Blocking. Never throws for a fault of the kernel: it comes back in the outcome.
Outcome execute(const Dispatch& dispatch, const ExecutorOptions& options);

}  // namespace sim
