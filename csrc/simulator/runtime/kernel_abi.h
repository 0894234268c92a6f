// The contract between a compiled Metal kernel and the executor that runs it.
//
// Included by the executor (ordinary C++) and, before anything else, by every kernel that the
// simulator's compiler builds. Plain data only: no std types, no address spaces.
//
// Each Metal thread is a fibre. Its stack is kStackBytes large and aligned to kStackBytes, and the
// Thread record lies at the stack's lowest address, so that a kernel finds its own record by masking
// the frame address: no thread-local storage, no symbol shared between libraries.
#pragma once

#include <stdint.h>

namespace sim {

constexpr uint32_t kSimdWidth = 32;
constexpr uint32_t kMaxBuffers = 31;  // slots of the buffer argument table
constexpr uint32_t kMaxThreadgroupBytes = 32768;
constexpr uint32_t kMaxThreadsPerThreadgroup = 1024;
constexpr uintptr_t kStackBytes = 128 * 1024;
constexpr uint32_t kMatrixLogCapacity = 64;

struct Thread;

// Where in the source a thread waits; 0 when not known. Threads that wait for each other must do so at
// one place.
using Site = uint32_t;
constexpr uint32_t kSiteColumnBits = 8;
constexpr Site site_of(uint32_t line, uint32_t column) {
  return line << kSiteColumnBits | (column & ((1u << kSiteColumnBits) - 1));
}
constexpr uint32_t line_of(Site site) {
  return site >> kSiteColumnBits;
}

// One value of one lane on its way through a shuffle, reduction or vote.
struct alignas(16) LaneValue {
  unsigned char bytes[16];
};

enum ElementType : uint32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

// One pending 8x8 product d += a * b. Lanes run ahead and log their operands here; the executor
// evaluates the whole log when the last lane of the simdgroup asks for a result.
struct MatrixProduct {
  float a[kSimdWidth][2];
  float b[kSimdWidth][2];
  void* d[kSimdWidth];  // two adjacent elements of type d_type, read and written
  ElementType d_type;
};

struct Simdgroup {
  LaneValue exchange[2][kSimdWidth];  // double buffered: see Services::exchange
  MatrixProduct products[kMatrixLogCapacity];
  uint32_t matrix_epoch;  // +1 each time the log has been evaluated; starts at 1
  uint32_t index;  // in the threadgroup
  uint32_t num_lanes;  // 32, fewer in a last partial simdgroup
};

enum MemoryFlags : uint32_t { kMemNone = 0, kMemDevice = 1, kMemThreadgroup = 2, kMemTexture = 4 };

// What a kernel may ask of the executor. Every call is made on the calling thread's own fibre and may
// switch to others; none returns when the dispatch has failed meanwhile.
struct Services {
  void (*threadgroup_barrier)(Thread*, uint32_t memory_flags, Site);
  void (*simdgroup_barrier)(Thread*, uint32_t memory_flags, Site);
  // Publishes 16 bytes and waits for every lane of the simdgroup. Returns the 32 values, which stay
  // valid until this lane's next but one exchange. Lanes that do not exist read as 0xFF bytes.
  const LaneValue* (*exchange)(Thread*, const LaneValue* mine, Site);
  // Waits for every lane of the simdgroup, evaluates the matrix log, clears it.
  void (*matrix_flush)(Thread*);
  // Storage of the threadgroup array number `id` of this kernel: the same address for every thread of
  // one threadgroup. Bytes that no thread has written are known as such.
  void* (*threadgroup_memory)(Thread*, uint32_t id, uint32_t bytes, uint32_t alignment,
                              const char* name);
  // Called before each access of an instrumented kernel that is not to a fibre's own stack.
  void (*access)(Thread*, const void* address, uint32_t bytes, bool is_write);
  // Atomics count as ordered accesses: checked for bounds, never a race among themselves.
  void (*atomic_access)(Thread*, const void* address, uint32_t bytes);
  // The kernel found a fault itself (an unbound slot that it reads, an assertion of the library).
  void (*fault)(Thread*, const char* message);
};

struct ThreadCounters {
  uint64_t exponentials;
};

struct Thread {
  const Services* services;
  Simdgroup* simdgroup;
  void* threadgroup;  // executor's own record
  void* fibre;  // executor's own record
  uintptr_t stacks_begin, stacks_end;  // all fibre stacks of this worker
  uint32_t lane;
  uint32_t num_logged;  // entries of simdgroup->products that this lane has filled
  ThreadCounters counters;

  // Values of MSL's thread position attributes.
  uint32_t thread_position_in_grid[3];
  uint32_t thread_position_in_threadgroup[3];
  uint32_t threadgroup_position_in_grid[3];
  uint32_t threads_per_threadgroup[3];
  uint32_t dispatch_threads_per_threadgroup[3];
  uint32_t threads_per_grid[3];
  uint32_t threadgroups_per_grid[3];
  uint32_t grid_size[3];
  uint32_t thread_index_in_threadgroup;
  uint32_t thread_index_in_simdgroup;
  uint32_t simdgroup_index_in_threadgroup;
  uint32_t simdgroups_per_threadgroup;
  uint32_t threads_per_simdgroup;
};

// Arguments of one dispatch, as a kernel's entry point sees them.
struct Launch {
  void* buffers[kMaxBuffers];  // host address of (buffer + offset), null when unbound
  uint32_t threadgroup_bytes[kMaxBuffers];  // setThreadgroupMemoryLength:atIndex:
};

// A compiled kernel exports two symbols. The first runs one Metal thread from start to end.
using KernelEntry = void (*)(const Launch*);
#define SIM_KERNEL_ENTRY_NAME "sim_kernel_entry"

struct ParameterRecord {
  const char* name;
  uint32_t slot;
  uint32_t alignment;  // what a binding's offset must be a multiple of
  bool is_buffer;  // in device, constant or threadgroup memory; else a thread position
  bool is_threadgroup;
  bool is_writable;
  bool exists;  // false: switched off by its function constant
  bool is_constant;  // in constant memory
};

// The second is what the kernel says about itself.
struct KernelRecord {
  const ParameterRecord* parameters;
  uint32_t num_parameters;
  uint32_t max_total_threads;  // 0: not stated
};
#define SIM_KERNEL_RECORD_NAME "sim_kernel_record"

inline __attribute__((always_inline)) Thread* current_thread() {
  return reinterpret_cast<Thread*>(reinterpret_cast<uintptr_t>(__builtin_frame_address(0)) &
                                   ~(kStackBytes - 1));
}

}  // namespace sim
