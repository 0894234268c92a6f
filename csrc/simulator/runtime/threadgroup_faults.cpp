// What a threadgroup says when it fails.
#include <csignal>

#include "fault_text.h"
#include "threadgroup.h"

namespace sim {
namespace {

const char* name_of(Wait wait) {
  switch (wait) {
    case Wait::ThreadgroupBarrier: return "threadgroup_barrier";
    case Wait::SimdgroupBarrier: return "simdgroup_barrier";
    case Wait::Exchange: return "a simdgroup shuffle, reduction or vote";
    case Wait::MatrixFlush: return "a simdgroup matrix operation";
    case Wait::Nothing: break;
  }
  return "no barrier";
}

std::string line_of_stop(const Stop& stop) {
  return stop.site ? " (line " + std::to_string(line_of(stop.site)) + ")" : "";
}

}  // namespace

std::string Threadgroup::subject(const Thread* thread) const {
  return "kernel '" + run_->info.name + "': " + describe_thread(*thread);
}

std::string Threadgroup::describe(Lane lane) const {
  Thread thread;   // a lane that has returned has lost its record to another one
  make_thread(thread, lane.simdgroup, lane.index);
  return describe_thread(thread);
}

void Threadgroup::fail_access(const Thread& thread, uintptr_t address, uint32_t bytes,
                              AccessKind kind) {
  fail(subject(&thread) + " " + checker_.describe(thread, address, bytes, kind));
}

void Threadgroup::fail_divergent(Lane waiting, Stop stop, Lane missing, Stop missing_at) {
  const bool is_for_all = stop.wait == Wait::ThreadgroupBarrier;
  std::string fate = " has returned without reaching it";
  if (missing_at.wait == stop.wait)
    fate = " waits at another one" + line_of_stop(missing_at);
  else if (missing_at.wait != Wait::Nothing)
    fate = std::string(" waits at ") + name_of(missing_at.wait) + line_of_stop(missing_at);
  fail("kernel '" + run_->info.name + "': " + describe(waiting) + " waits at " +
       name_of(stop.wait) + line_of_stop(stop) + ", but " + describe(missing) + fate +
       "; every thread of the " + (is_for_all ? "threadgroup" : "simdgroup") + " must reach it");
}

void Threadgroup::crash(const Crash& crash) {
  crash_ = crash;
  leave();
}

std::string Threadgroup::describe_crash() const {
  std::string text = "kernel '" + run_->info.name + "': ";
  const uintptr_t base = crash_.stack_pointer & ~(kStackBytes - 1);
  const bool is_known = base >= stacks_.begin() && base < stacks_.end();
  text += is_known ? describe_thread(*reinterpret_cast<const Thread*>(base)) : "a thread";
  if (crash_.signal == SIGFPE) return text + " divides an integer by zero";
  if (crash_.signal == SIGILL) return text + " runs into code that nothing can reach";
  if (stacks_.is_guard(crash_.address)) {
    return text + " needs more than its " + std::to_string(kStackBytes / 1024) +
           " KB of stack for local variables";
  }
  if (!crash_.has_address) return text + " uses a pointer that is no address";
  text += !crash_.is_write ? " accesses " : *crash_.is_write ? " writes " : " reads ";
  const std::string unbound = run_->buffers.describe_unbound(crash_.address);
  if (!unbound.empty()) {
    return text + "null + " + std::to_string(intptr_t(crash_.address)) + ": " + unbound;
  }
  return text + run_->buffers.describe(crash_.address) + ", outside every bound buffer";
}

}  // namespace sim
