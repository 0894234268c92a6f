#include "fibre_stacks.h"

#include <sys/mman.h>
#include <unistd.h>

namespace sim {
namespace {

constexpr uintptr_t kRegionBytes = (kMaxThreadsPerThreadgroup + 1) * kStackBytes;

}  // namespace

FibreStacks::FibreStacks()
    : pages_(kRegionBytes),
      begin_((reinterpret_cast<uintptr_t>(pages_.data()) + kStackBytes - 1) & ~(kStackBytes - 1)),
      page_bytes_(sysconf(_SC_PAGESIZE)) {
  free_.reserve(kMaxThreadsPerThreadgroup);
}

Thread* FibreStacks::take() {
  if (!free_.empty()) {
    Thread* thread = free_.back();
    free_.pop_back();
    return thread;
  }
  // A system may refuse more protected pages than so many (vm.max_map_count): then this stack has no
  // guard, and nothing else changes.
  Thread* thread = record(num_made_++);
  mprotect(reinterpret_cast<char*>(thread) + page_bytes_, page_bytes_, PROT_NONE);
  return thread;
}

void FibreStacks::reclaim() {
  free_.clear();
  for (uint32_t i = num_made_; i-- > 0;) free_.push_back(record(i));
}

void* FibreStacks::top(const Thread* thread) const {
  // Stacks lie a power of two apart; without this shift all fibres would compete for the same sets of
  // the first-level cache.
  const uintptr_t base = reinterpret_cast<uintptr_t>(thread);
  const uintptr_t index = (base - begin_) / kStackBytes;
  return reinterpret_cast<void*>(base + kStackBytes - index % 32 * 128);
}

bool FibreStacks::is_guard(uintptr_t address) const {
  return address >= begin() && address < end() &&
         (address - begin_) % kStackBytes / page_bytes_ == 1;
}

}  // namespace sim
