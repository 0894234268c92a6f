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

}  // namespace

std::string Threadgroup::subject(const Thread* thread) const {
  return "kernel '" + run_->info.name + "': " + describe_thread(*thread);
}

std::string Threadgroup::describe(Lane lane) const {
  Thread thread;   // a lane that has returned has lost its record to another one
  make_thread(thread, lane.simdgroup, lane.index);
  return describe_thread(thread);
}

void Threadgroup::fail_divergent(Lane waiting, Wait wait, Lane missing, Wait missing_at) {
  const bool is_for_all = wait == Wait::ThreadgroupBarrier;
  fail("kernel '" + run_->info.name + "': " + describe(waiting) + " waits at " + name_of(wait) +
       ", but " + describe(missing) +
       (missing_at == Wait::Nothing ? " has returned without reaching it"
                                    : std::string(" waits at ") + name_of(missing_at)) +
       "; every thread of the " + (is_for_all ? "threadgroup" : "simdgroup") + " must reach it");
}

void Threadgroup::crash(int signal, uintptr_t address, std::optional<bool> is_write) {
  crash_ = {signal, address, is_write};
  leave();
}

}  // namespace sim
