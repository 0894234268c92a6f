#include "threadgroup.h"

#include <bit>
#include <cstring>
#include <new>

#include "fault_text.h"
#include "matrix_log.h"

namespace sim {

using boost::context::detail::fcontext_t;
using boost::context::detail::jump_fcontext;
using boost::context::detail::make_fcontext;
using boost::context::detail::transfer_t;

namespace {

constexpr uint32_t kMaxSimdgroups = kMaxThreadsPerThreadgroup / kSimdWidth;
constexpr uint32_t kNumRings = 8;

uint32_t first_bit(uint32_t mask) {
  return std::countr_zero(mask);
}

uint32_t mask_of(uint32_t count) {
  return count < 32 ? (1u << count) - 1 : ~0u;
}

// Every context is a suspended jump. Whoever is jumped to stores where the other one can be resumed.
inline __attribute__((always_inline)) void jump(fcontext_t& from, fcontext_t to) {
  const transfer_t back = jump_fcontext(to, &from);
  *static_cast<fcontext_t*>(back.data) = back.fctx;
}

Ring make_ring(uint32_t count, uint64_t* random) {
  uint8_t order[kSimdWidth];
  for (uint32_t i = 0; i < count; ++i) order[i] = i;
  for (uint32_t i = count; random && i > 1; --i) {
    std::swap(order[i - 1], order[next_random(*random) % i]);
  }
  Ring ring{};
  ring.first = order[0];
  for (uint32_t i = 0; i < count; ++i) ring.next[order[i]] = order[i + 1 < count ? i + 1 : 0];
  return ring;
}

}  // namespace

const Services Threadgroup::kServices = {
    .threadgroup_barrier = threadgroup_barrier,
    .simdgroup_barrier = simdgroup_barrier,
    .exchange = exchange,
    .matrix_flush = matrix_flush,
    .threadgroup_memory = threadgroup_memory,
    .access = access,
    .atomic_access = atomic_access,
    .fault = fault,
};

Threadgroup::Threadgroup()
    : simdgroup_pages_(kMaxSimdgroups * sizeof(SimdgroupState)),
      simdgroups_(static_cast<SimdgroupState*>(simdgroup_pages_.data())) {}

void Threadgroup::begin(DispatchRun& run) {
  run_ = &run;
  counters_ = {};
  checker_.begin_dispatch(run);
}

void Threadgroup::execute(uint64_t position) {
  position_ = position;
  const uint64_t threadgroup = run_->threadgroup_at(position);
  place(threadgroup);
  make_simdgroups();
  checker_.begin_threadgroup(threadgroup);

  is_running_ = true;
  const uint32_t first = simdgroup_ring_.first;
  resume(scheduler_, first, simdgroups_[first].ring->first);
  is_running_ = false;

  ++counters_.threadgroups;
  if (crash_.signal) {
    run_->report(position_, describe_crash());
    crash_ = {};
  }
  if (returned_simdgroups_ != all_simdgroups_) stacks_.reclaim();
}

void Threadgroup::place(uint64_t threadgroup) {
  prototype_.services = &kServices;
  prototype_.threadgroup = this;
  prototype_.stacks_begin = stacks_.begin();
  prototype_.stacks_end = stacks_.end();
  run_->place_threadgroup(prototype_, threadgroup);
  const uint32_t(&size)[3] = prototype_.threads_per_threadgroup;
  num_threads_ = size[0] * size[1] * size[2];
  num_simdgroups_ = prototype_.simdgroups_per_threadgroup;
  if (run_->shuffle_seed) random_ = *run_->shuffle_seed + threadgroup * 0xD1342543DE82EF95u;
}

void Threadgroup::make_rings() {
  const bool is_shuffled = run_->shuffle_seed.has_value();
  uint64_t* random = is_shuffled ? &random_ : nullptr;
  const uint32_t last_count = num_threads_ - (num_simdgroups_ - 1) * kSimdWidth;
  rings_.resize(is_shuffled ? kNumRings : 1);
  last_rings_.resize(rings_.size());
  for (Ring& ring : rings_) ring = make_ring(kSimdWidth, random);
  for (Ring& ring : last_rings_) ring = make_ring(last_count, random);
  simdgroup_ring_ = make_ring(num_simdgroups_, random);
}

void Threadgroup::make_simdgroups() {
  make_rings();
  waiting_simdgroups_ = returned_simdgroups_ = 0;
  barrier_flags_ = ~0u;
  all_simdgroups_ = mask_of(num_simdgroups_);
  for (uint32_t i = 0; i < num_simdgroups_; ++i) {
    SimdgroupState& s = simdgroups_[i];
    const uint32_t num_lanes = std::min(num_threads_ - i * kSimdWidth, kSimdWidth);
    s.shared.matrix_epoch = 1;
    s.shared.index = i;
    s.shared.num_lanes = num_lanes;
    for (auto& buffer : s.shared.exchange) {
      std::memset(buffer + num_lanes, 0xFF, (kSimdWidth - num_lanes) * sizeof(LaneValue));
    }
    std::fill(std::begin(s.contexts), std::end(s.contexts), nullptr);
    std::fill(std::begin(s.threads), std::end(s.threads), nullptr);
    s.lanes = mask_of(num_lanes);
    s.waiting = s.returned = 0;
    s.stop = {};
    s.exchange_parity = 0;
    s.ring = i + 1 < num_simdgroups_ ? &rings_[0] : &last_rings_[0];
    s.next_lane = s.ring->first;
  }
}

void Threadgroup::make_thread(Thread& thread, uint32_t simdgroup, uint32_t lane) const {
  thread = prototype_;
  thread.simdgroup = &simdgroups_[simdgroup].shared;
  DispatchRun::place_thread(thread, simdgroup * kSimdWidth + lane);
}

void Threadgroup::fibre_main(transfer_t from) {
  *static_cast<fcontext_t*>(from.data) = from.fctx;
  Thread* thread = current_thread();
  Threadgroup& self = of(thread);
  const Launch* launch = &self.run_->launch;
  do {
    self.run_->entry(launch);
  } while (self.finish(thread));
  self.leave();
}

__attribute__((noinline)) fcontext_t Threadgroup::start(uint32_t simdgroup, uint32_t lane) {
  Thread* thread = stacks_.take();
  make_thread(*thread, simdgroup, lane);
  simdgroups_[simdgroup].threads[lane] = thread;
  return make_fcontext(stacks_.top(thread), kStackBytes / 2, fibre_main);
}

// This and arrive() are part of each service rather than called: after a switch the processor
// mispredicts every return, so there should be one only.
inline __attribute__((always_inline)) void Threadgroup::resume(fcontext_t& from, uint32_t simdgroup,
                                                               uint32_t lane) {
  fcontext_t to = simdgroups_[simdgroup].contexts[lane];
  if (!to) to = start(simdgroup, lane);
  jump(from, to);
}

// Waits until all lanes of the simdgroup are here. True for the lane that came last, which runs on.
inline __attribute__((always_inline)) bool Threadgroup::arrive(Thread* thread, Stop stop,
                                                               uint32_t memory_flags) {
  SimdgroupState& s = state(thread);
  if (!s.waiting) {
    s.stop = stop;
    s.memory_flags = memory_flags;
  } else if (s.stop != stop) {
    fail_divergent(first_lane(s, s.waiting), s.stop, lane_of(thread), stop);
  }
  s.memory_flags &= memory_flags;
  s.waiting |= 1u << thread->lane;
  if (s.waiting == s.lanes) return true;
  if (s.returned) {
    fail_divergent(lane_of(thread), stop, first_lane(s, s.returned), {});
  }
  resume(s.contexts[thread->lane], s.shared.index, s.ring->next[thread->lane]);
  return false;
}

void Threadgroup::complete(SimdgroupState& s) {
  s.waiting = 0;
  if (run_->shuffle_seed) {
    const auto& rings = s.shared.index + 1 < num_simdgroups_ ? rings_ : last_rings_;
    s.ring = &rings[next_random(random_) % kNumRings];
  }
  if (run_->is_cancelled(position_)) leave();
}

void Threadgroup::threadgroup_barrier(Thread* thread, uint32_t memory_flags, Site site) {
  Threadgroup& self = of(thread);
  const Stop stop{Wait::ThreadgroupBarrier, site};
  if (!self.arrive(thread, stop, memory_flags)) return;
  SimdgroupState& s = self.state(thread);
  const uint32_t index = s.shared.index;
  if (!self.waiting_simdgroups_) {
    self.barrier_site_ = site;
  } else if (self.barrier_site_ != site) {
    self.fail_divergent({first_bit(self.waiting_simdgroups_), 0},
                        {Wait::ThreadgroupBarrier, self.barrier_site_}, lane_of(thread), stop);
  }
  self.waiting_simdgroups_ |= 1u << index;
  self.barrier_flags_ &= s.memory_flags;
  if (self.waiting_simdgroups_ != self.all_simdgroups_) {
    if (const uint32_t returned = self.returned_simdgroups_) {
      self.fail_divergent(lane_of(thread), stop, {first_bit(returned), 0}, {});
    }
    s.next_lane = thread->lane;
    const uint32_t next = self.simdgroup_ring_.next[index];
    self.resume(s.contexts[thread->lane], next, self.simdgroups_[next].next_lane);
    return;
  }
  self.waiting_simdgroups_ = 0;
  self.checker_.threadgroup_barrier(self.barrier_flags_);
  self.barrier_flags_ = ~0u;
  ++self.counters_.threadgroup_barriers;
  for (uint32_t i = 0; i < self.num_simdgroups_; ++i) self.complete(self.simdgroups_[i]);
  if (self.run_->shuffle_seed) {
    self.simdgroup_ring_ = make_ring(self.num_simdgroups_, &self.random_);
  }
}

void Threadgroup::simdgroup_barrier(Thread* thread, uint32_t memory_flags, Site site) {
  Threadgroup& self = of(thread);
  if (!self.arrive(thread, {Wait::SimdgroupBarrier, site}, memory_flags)) return;
  SimdgroupState& s = self.state(thread);
  self.checker_.simdgroup_barrier(s.shared.index, s.memory_flags);
  ++self.counters_.simdgroup_barriers;
  self.complete(s);
}

const LaneValue* Threadgroup::exchange(Thread* thread, const LaneValue* mine, Site site) {
  Threadgroup& self = of(thread);
  SimdgroupState& s = self.state(thread);
  LaneValue* values = s.shared.exchange[s.exchange_parity];
  values[thread->lane] = *mine;
  if (self.arrive(thread, {Wait::Exchange, site}, kMemNone)) {
    s.exchange_parity ^= 1;
    ++self.counters_.shuffles;
    self.complete(s);
  }
  return values;
}

void Threadgroup::matrix_flush(Thread* thread) {
  Threadgroup& self = of(thread);
  if (!self.arrive(thread, {Wait::MatrixFlush}, kMemNone)) return;
  SimdgroupState& s = self.state(thread);
  if (s.lanes != ~0u) {
    self.fail(self.subject(thread) + " uses a simdgroup matrix in a simdgroup of " +
              std::to_string(s.shared.num_lanes) + " threads; all 32 lanes have to exist");
  }
  const uint32_t count = thread->num_logged;
  for (Thread* other : s.threads) {
    if (other->num_logged != count) {
      self.fail(self.subject(thread) + " has multiplied " + std::to_string(count) +
                " simdgroup matrices where " + describe_thread(*other) + " has multiplied " +
                std::to_string(other->num_logged) +
                "; every thread of a simdgroup must reach each simdgroup matrix operation");
    }
    other->num_logged = 0;
  }
  evaluate_matrix_log(s.shared.products, count);
  ++s.shared.matrix_epoch;
  self.counters_.matrix_products += count;
  self.complete(s);
}

bool Threadgroup::finish(Thread* thread) {
  counters_.exponentials += thread->counters.exponentials;
  SimdgroupState& s = state(thread);
  uint32_t simdgroup = s.shared.index;
  s.returned |= 1u << thread->lane;
  if (s.waiting) {
    fail_divergent(first_lane(s, s.waiting), s.stop, lane_of(thread), {});
  }
  if (waiting_simdgroups_) {
    fail_divergent({first_bit(waiting_simdgroups_), 0}, {Wait::ThreadgroupBarrier, barrier_site_},
                   lane_of(thread), {});
  }
  uint32_t lane = s.ring->next[thread->lane];
  if (s.returned == s.lanes) {
    returned_simdgroups_ |= 1u << simdgroup;
    if (returned_simdgroups_ == all_simdgroups_ || run_->is_cancelled(position_)) {
      stacks_.give_back(thread);
      return false;
    }
    simdgroup = simdgroup_ring_.next[simdgroup];
    lane = simdgroups_[simdgroup].next_lane;
  }
  SimdgroupState& next = simdgroups_[simdgroup];
  if (!next.contexts[lane]) {
    make_thread(*thread, simdgroup, lane);
    next.threads[lane] = thread;
    return true;
  }
  stacks_.give_back(thread);
  fcontext_t unused;
  jump(unused, next.contexts[lane]);
  __builtin_unreachable();
}

void* Threadgroup::threadgroup_memory(Thread* thread, uint32_t id, uint32_t bytes,
                                      uint32_t alignment, const char* name) {
  Threadgroup& self = of(thread);
  if (void* array = self.checker_.memory().place(id, bytes, alignment, name)) return array;
  self.fail(self.subject(thread) + " needs " + std::to_string(self.checker_.memory().bytes_used()) +
            " bytes of threadgroup memory with array '" + name + "'; a threadgroup has " +
            std::to_string(kMaxThreadgroupBytes));
}

inline __attribute__((always_inline)) void Threadgroup::check(const Thread& thread,
                                                              const void* pointer, uint32_t bytes,
                                                              AccessKind kind) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  bool is_clean = false, has_memory = true;
  try {
    is_clean = checker_.access(thread, address, bytes, kind);
  } catch (const std::bad_alloc&) {
    has_memory = false;  // no exception may cross a kernel
  }
  if (!has_memory) fail(subject(&thread) + ": not enough memory to check its accesses");
  if (!is_clean) [[unlikely]]
    fail_access(thread, address, bytes, kind);
}

void Threadgroup::access(Thread* thread, const void* address, uint32_t bytes, bool is_write) {
  of(thread).check(*thread, address, bytes, is_write ? AccessKind::Write : AccessKind::Read);
}

void Threadgroup::atomic_access(Thread* thread, const void* address, uint32_t bytes) {
  of(thread).check(*thread, address, bytes, AccessKind::Atomic);
}

void Threadgroup::fault(Thread* thread, const char* message) {
  Threadgroup& self = of(thread);
  self.fail(self.subject(thread) + ": " + message);
}

void Threadgroup::leave() {
  fcontext_t unused;
  jump(unused, scheduler_);
  __builtin_unreachable();
}

void Threadgroup::fail(std::string message) {
  run_->report(position_, std::move(message));
  leave();
}

}  // namespace sim
