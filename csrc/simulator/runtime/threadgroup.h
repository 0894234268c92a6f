// Runs one threadgroup at a time: its threads are fibres that hand over to each other directly.
#pragma once

#include <bit>
#include <boost/context/detail/fcontext.hpp>
#include <string>
#include <vector>

#include "access_checker.h"
#include "dispatch_run.h"
#include "fibre_stacks.h"

namespace sim {

enum class Wait : uint32_t { Nothing, ThreadgroupBarrier, SimdgroupBarrier, Exchange, MatrixFlush };

// What a thread waits for, and where.
struct Stop {
  Wait wait = Wait::Nothing;
  Site site = 0;
  bool operator==(const Stop&) const = default;
};

// The order in which lanes, or simdgroups, take turns: a cycle through all of them.
struct Ring {
  uint8_t next[kSimdWidth];
  uint8_t first;
};

struct SimdgroupState {
  Simdgroup shared;                // first: what Thread::simdgroup points to
  boost::context::detail::fcontext_t contexts[kSimdWidth];   // null: not started
  Thread* threads[kSimdWidth];
  const Ring* ring;
  uint32_t lanes, waiting, returned;   // one bit per lane
  Stop stop;                       // where those that wait do so
  uint32_t memory_flags;           // of the barrier that the lanes wait at
  uint32_t exchange_parity;
  uint32_t next_lane;              // takes over when the simdgroup gets its turn
};

// What the handler of a signal knows.
struct Crash {
  int signal = 0;
  uintptr_t address = 0, stack_pointer = 0;
  bool has_address = true;         // false where the processor does not tell
  std::optional<bool> is_write;    // likewise
};

class Threadgroup {
 public:
  Threadgroup();
  Threadgroup(const Threadgroup&) = delete;
  Threadgroup& operator=(const Threadgroup&) = delete;

  void begin(DispatchRun& run);
  // Runs the threadgroup at this place of the execution order; reports a fault to the dispatch.
  void execute(uint64_t position);
  // Called by the handler of SIGSEGV and the like on the thread that runs a fibre: does not return.
  [[noreturn]] void crash(const Crash& crash);
  bool is_running() const { return is_running_; }
  const Counters& counters() const { return counters_; }
  const AccessChecker& checker() const { return checker_; }

 private:
  struct Lane {
    uint32_t simdgroup, index;
  };
  static const Services kServices;
  static void fibre_main(boost::context::detail::transfer_t from);
  static void threadgroup_barrier(Thread* thread, uint32_t memory_flags, Site site);
  static void simdgroup_barrier(Thread* thread, uint32_t memory_flags, Site site);
  static const LaneValue* exchange(Thread* thread, const LaneValue* mine, Site site);
  static void matrix_flush(Thread* thread);
  static void* threadgroup_memory(Thread* thread, uint32_t id, uint32_t bytes, uint32_t alignment,
                                  const char* name);
  static void access(Thread* thread, const void* address, uint32_t bytes, bool is_write);
  static void atomic_access(Thread* thread, const void* address, uint32_t bytes);
  static void fault(Thread* thread, const char* message);

  void place(uint64_t threadgroup);
  void make_simdgroups();
  void make_rings();
  void make_thread(Thread& thread, uint32_t simdgroup, uint32_t lane) const;

  bool arrive(Thread* thread, Stop stop, uint32_t memory_flags);
  void complete(SimdgroupState& simdgroup);
  boost::context::detail::fcontext_t start(uint32_t simdgroup, uint32_t lane);
  void resume(boost::context::detail::fcontext_t& from, uint32_t simdgroup, uint32_t lane);
  // After a thread has returned: true when its fibre goes on as another thread.
  bool finish(Thread* thread);

  void check(const Thread& thread, const void* pointer, uint32_t bytes, AccessKind kind);

  [[noreturn]] void fail(std::string message);
  [[noreturn]] void fail_access(const Thread& thread, uintptr_t address, uint32_t bytes,
                                AccessKind kind);
  [[noreturn]] void fail_divergent(Lane waiting, Stop stop, Lane missing, Stop missing_at);
  [[noreturn]] void leave();
  std::string describe_crash() const;
  std::string subject(const Thread* thread) const;
  std::string describe(Lane lane) const;

  SimdgroupState& state(const Thread* thread) const {
    return *reinterpret_cast<SimdgroupState*>(thread->simdgroup);
  }
  static Lane lane_of(const Thread* thread) { return {thread->simdgroup->index, thread->lane}; }
  static Lane first_lane(const SimdgroupState& simdgroup, uint32_t lanes) {
    return {simdgroup.shared.index, uint32_t(std::countr_zero(lanes))};
  }
  static Threadgroup& of(const Thread* thread) {
    return *static_cast<Threadgroup*>(thread->threadgroup);
  }

  DispatchRun* run_ = nullptr;
  FibreStacks stacks_;
  ZeroPages simdgroup_pages_;
  SimdgroupState* const simdgroups_;
  AccessChecker checker_;
  Counters counters_;  // all but the bytes

  uint64_t position_ = 0;
  Thread prototype_{};  // what all threads of this threadgroup have in common
  uint32_t num_threads_ = 0, num_simdgroups_ = 0;
  uint32_t waiting_simdgroups_ = 0, returned_simdgroups_ = 0;  // one bit per simdgroup
  uint32_t all_simdgroups_ = 0;
  uint32_t barrier_flags_ = 0;  // that every simdgroup at the barrier has named
  Site barrier_site_ = 0;
  uint64_t random_ = 0;
  std::vector<Ring> rings_, last_rings_;  // of full simdgroups, and of a last partial one
  Ring simdgroup_ring_{};
  boost::context::detail::fcontext_t scheduler_ = nullptr;
  bool is_running_ = false;
  Crash crash_;
};

}  // namespace sim
