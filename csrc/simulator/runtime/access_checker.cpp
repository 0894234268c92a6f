#include "access_checker.h"

#include "dispatch_run.h"
#include "fault_text.h"

namespace sim {
namespace {

const BufferRegion kNoRegion;

const char* past_verb(bool is_write) {
  return is_write ? "written" : "read";
}

}  // namespace

void AccessChecker::begin_dispatch(DispatchRun& run) {
  run_ = &run;
  buffers_ = &run.buffers;
  region_ = &kNoRegion;
  uint32_t reserved = 0;
  for (uint32_t bytes : run.dispatch.threadgroup_bytes) reserved += bytes;
  memory_.begin_dispatch(run.info, reserved);
  traffic_.begin_dispatch(run.buffers.num_lines(), run.first_number);
  counters_ = {};
}

void AccessChecker::begin_threadgroup(uint64_t threadgroup) {
  threadgroup_ = uint32_t(run_->first_number + threadgroup);
  memory_.begin_threadgroup();
  device_order_
      .begin_threadgroup();   // its stamps count only together with the threadgroup's number
  traffic_.begin_threadgroup(threadgroup_);
  race_ = {};
}

void AccessChecker::threadgroup_barrier(uint32_t memory_flags) {
  if (memory_flags & kMemThreadgroup) memory_.order().threadgroup_barrier();
  if (memory_flags & kMemDevice) device_order_.threadgroup_barrier();
}

void AccessChecker::simdgroup_barrier(uint32_t simdgroup, uint32_t memory_flags) {
  if (memory_flags & kMemThreadgroup) memory_.order().simdgroup_barrier(simdgroup);
  if (memory_flags & kMemDevice) device_order_.simdgroup_barrier(simdgroup);
}

bool AccessChecker::is_ordered(const Thread& thread, uintptr_t address, uint32_t bytes,
                               AccessKind kind) {
  DeviceShadow& shadow = *run_->shadow;
  const uint32_t index = thread.thread_index_in_threadgroup;
  const uint64_t first_cell = region_->first_cell + (address - region_->begin);
  for (uint32_t i = 0; i < bytes; ++i) {
    const uint64_t cell = first_cell + i;
    race_ = kind == AccessKind::Read    ? shadow.read(cell, threadgroup_, index, device_order_)
            : kind == AccessKind::Write ? shadow.write(cell, threadgroup_, index, device_order_)
                                        : shadow.update(cell, threadgroup_, index, device_order_);
    if (race_) [[unlikely]] {
      race_address_ = address + i;
      return false;
    }
  }
  return true;
}

// A kernel also reads what belongs to nobody else: its arguments, records of the executor, and the
// constant tables of its own binary.
bool AccessChecker::is_harmless(const Thread& thread, uintptr_t address, uint32_t bytes,
                                AccessKind kind) const {
  const auto is_in = [&](const void* object, size_t size) {
    const uintptr_t offset = address - reinterpret_cast<uintptr_t>(object);
    return offset < size && size - offset >= bytes;
  };
  if (address >= thread.stacks_begin && address < thread.stacks_end) return true;
  if (kind != AccessKind::Read) return false;
  return is_in(&run_->launch, sizeof(Launch)) || is_in(thread.services, sizeof(Services)) ||
         run_->is_in_kernel_image(address);
}

std::string AccessChecker::describe(const Thread& thread, uintptr_t address, uint32_t bytes,
                                    AccessKind kind) const {
  const char* verb = kind == AccessKind::Read    ? "reads "
                     : kind == AccessKind::Write ? "writes "
                                                 : "updates ";
  std::string text = verb + std::to_string(bytes) + (bytes == 1 ? " byte at " : " bytes at ");
  if (memory_.contains(address)) {
    const auto& detail = memory_.detail();
    text += memory_.describe(detail.offset);
    switch (finding_) {
      case ThreadgroupMemory::Finding::OutsideArray: return text + ", outside the array";
      case ThreadgroupMemory::Finding::NeverWritten:
        return text + ", which no thread has written so far";
      case ThreadgroupMemory::Finding::RaceWithWrite:
      case ThreadgroupMemory::Finding::RaceWithRead: break;
      case ThreadgroupMemory::Finding::Clean: return text;
    }
    const bool is_write = finding_ == ThreadgroupMemory::Finding::RaceWithWrite;
    return text + ", which " +
           run_->describe_who(thread, detail.other, threadgroup_ - run_->first_number) + " has " +
           past_verb(is_write) + " without a barrier in between";
  }
  if (race_) {
    const uint64_t other = race_.threadgroup - run_->first_number;
    text += buffers_->describe(race_address_) + ", which " +
            run_->describe_who(thread, race_.stamp, other) + " has " + past_verb(race_.is_write);
    return text + (race_.threadgroup == threadgroup_
                       ? " without a barrier in between"
                       : "; threadgroups of one dispatch are not ordered");
  }
  const std::string unbound = buffers_->describe_unbound(address);
  if (!unbound.empty()) {
    return text + "null + " + std::to_string(intptr_t(address)) + ": " + unbound;
  }
  return text + buffers_->describe(address) + ", outside every bound buffer";
}

}  // namespace sim
