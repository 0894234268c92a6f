// Every function publishes its own access before it looks for those of others, with sequentially
// consistent operations: of two workers that touch one byte at the same time, one sees the other.
#include "device_shadow.h"

namespace sim {
namespace {

constexpr size_t kKeptBytes = size_t(64) << 20;

uint64_t pack(uint32_t threadgroup, Stamp stamp) {
  return uint64_t(threadgroup) << 32 | stamp;
}
uint32_t threadgroup_of(uint64_t cell) {
  return cell >> 32;
}
Stamp stamp_of(uint64_t cell) {
  return uint32_t(cell);
}

}  // namespace

void DeviceShadow::begin_dispatch(uint64_t num_cells, uint32_t first_threadgroup) {
  if (first_threadgroup < first_threadgroup_ || pages_.bytes() > kKeptBytes) pages_ = ZeroPages();
  cells_ = nullptr;
  has_reads_ = false;
  num_cells_ = num_cells;
  first_threadgroup_ = first_threadgroup;
}

DeviceShadow::Cell* DeviceShadow::map() {
  const std::lock_guard lock(mutex_);
  if (!cells_) {
    const size_t bytes = 2 * num_cells_ * sizeof(Cell);
    if (pages_.bytes() < bytes) pages_ = ZeroPages(bytes);
    cells_ = static_cast<Cell*>(pages_.data());
  }
  return cells_;
}

Access DeviceShadow::conflict(uint64_t old, bool is_write, uint32_t threadgroup, uint32_t thread,
                              const MemoryOrder& order) const {
  const uint32_t other = threadgroup_of(old);
  if (other < first_threadgroup_) return {};
  const bool is_ordered = other == threadgroup && who(stamp_of(old)) != kSeveralThreadgroups &&
                          order.is_before(stamp_of(old), thread);
  return is_ordered ? Access{} : Access{stamp_of(old), other, is_write};
}

Access DeviceShadow::conflict_with_reads(uint64_t cell, uint32_t threadgroup, uint32_t thread,
                                         const MemoryOrder& order) {
  if (!has_reads_) return {};
  return conflict(cells()[num_cells_ + cell], false, threadgroup, thread, order);
}

Access DeviceShadow::read(uint64_t cell, uint32_t threadgroup, uint32_t thread,
                          const MemoryOrder& order) {
  if (!has_reads_) has_reads_ = true;
  Cell& reads = cells()[num_cells_ + cell];
  uint64_t old = reads, merged;
  do {
    const uint32_t other = threadgroup_of(old);
    if (other < first_threadgroup_) {
      merged = pack(threadgroup, order.stamp(thread));
    } else if (who(stamp_of(old)) == kSeveralThreadgroups) {
      merged = old;
    } else if (other != threadgroup) {
      merged = pack(threadgroup, (order.stamp(thread) & ~kWhoMask) | kSeveralThreadgroups);
    } else {
      merged = pack(threadgroup, order.merge_read(stamp_of(old), thread));
    }
  } while (merged != old && !reads.compare_exchange_weak(old, merged));
  return conflict(cells()[cell], true, threadgroup, thread, order);
}

Access DeviceShadow::write(uint64_t cell, uint32_t threadgroup, uint32_t thread,
                           const MemoryOrder& order) {
  const uint64_t old = cells()[cell].exchange(pack(threadgroup, order.stamp(thread)));
  if (const Access other = conflict(old, true, threadgroup, thread, order)) return other;
  return conflict_with_reads(cell, threadgroup, thread, order);
}

Access DeviceShadow::update(uint64_t cell, uint32_t threadgroup, uint32_t thread,
                            const MemoryOrder& order) {
  const uint64_t old = cells()[cell].exchange(pack(threadgroup, order.atomic_stamp(thread)));
  if (who(stamp_of(old)) != kAtomics) {
    if (const Access other = conflict(old, true, threadgroup, thread, order)) return other;
  }
  return conflict_with_reads(cell, threadgroup, thread, order);
}

}  // namespace sim
