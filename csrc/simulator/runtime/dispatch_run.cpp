#include "dispatch_run.h"

#include <link.h>

#include "fault_text.h"

namespace sim {
namespace {

uint32_t divide_up(uint32_t x, uint32_t y) {
  return x / y + (x % y != 0);
}

}  // namespace

DispatchRun::DispatchRun(const Dispatch& d, const ExecutorOptions& options)
    : dispatch(d),
      info(d.kernel->info()),
      entry(d.kernel->entry()),
      shuffle_seed(options.shuffle_seed),
      buffers(d) {
  for (uint32_t slot = 0; slot < kMaxBuffers; ++slot) {
    const BoundBuffer& buffer = d.buffers[slot];
    launch.buffers[slot] =
        buffer.contents ? static_cast<char*>(buffer.contents) + buffer.offset : nullptr;
    launch.threadgroup_bytes[slot] = d.threadgroup_bytes[slot];
  }
  const Extent& grid = d.threads_per_grid;
  const Extent& size = d.threads_per_threadgroup;
  threadgroups_per_grid = {divide_up(grid.x, size.x), divide_up(grid.y, size.y),
                           divide_up(grid.z, size.z)};
  num_threadgroups =
      uint64_t(threadgroups_per_grid.x) * threadgroups_per_grid.y * threadgroups_per_grid.z;
  if (shuffle_seed && num_threadgroups > 1) {
    uint64_t random = *shuffle_seed;
    // Below 2^32, so that position * stride cannot overflow for any grid that ends in our time.
    const uint64_t bound = std::min<uint64_t>(num_threadgroups, UINT32_MAX);
    first_ = next_random(random) % bound;
    do {
      stride_ = 1 + next_random(random) % bound;
    } while (std::gcd(stride_, num_threadgroups) != 1);
  }
}

void DispatchRun::place_threadgroup(Thread& t, uint64_t threadgroup) const {
  const Extent& grid = dispatch.threads_per_grid;
  const Extent& size = dispatch.threads_per_threadgroup;
  const Extent& groups = threadgroups_per_grid;
  const uint32_t where[3] = {uint32_t(threadgroup % groups.x),
                             uint32_t(threadgroup / groups.x % groups.y),
                             uint32_t(threadgroup / groups.x / groups.y)};
  const uint32_t threads_in_grid[3] = {grid.x, grid.y, grid.z};
  const uint32_t full_size[3] = {size.x, size.y, size.z};
  const uint32_t num_groups[3] = {groups.x, groups.y, groups.z};
  uint32_t num_threads = 1;
  for (int axis = 0; axis < 3; ++axis) {
    const uint32_t first = where[axis] * full_size[axis];
    t.threadgroup_position_in_grid[axis] = where[axis];
    t.threads_per_threadgroup[axis] = std::min(full_size[axis], threads_in_grid[axis] - first);
    t.dispatch_threads_per_threadgroup[axis] = full_size[axis];
    t.threads_per_grid[axis] = threads_in_grid[axis];
    t.threadgroups_per_grid[axis] = num_groups[axis];
    t.grid_size[axis] = threads_in_grid[axis];
    num_threads *= t.threads_per_threadgroup[axis];
  }
  t.simdgroups_per_threadgroup = divide_up(num_threads, kSimdWidth);
  t.threads_per_simdgroup = kSimdWidth;
}

void DispatchRun::place_thread(Thread& t, uint32_t index) {
  t.lane = t.thread_index_in_simdgroup = index % kSimdWidth;
  t.thread_index_in_threadgroup = index;
  t.simdgroup_index_in_threadgroup = index / kSimdWidth;
  for (int axis = 0; axis < 3; ++axis) {
    const uint32_t size = t.threads_per_threadgroup[axis];
    t.thread_position_in_threadgroup[axis] = index % size;
    index /= size;
    t.thread_position_in_grid[axis] =
        t.threadgroup_position_in_grid[axis] * t.dispatch_threads_per_threadgroup[axis] +
        t.thread_position_in_threadgroup[axis];
  }
}

std::string DispatchRun::describe_who(const Thread& thread, Stamp stamp,
                                      uint64_t threadgroup) const {
  const uint32_t w = who(stamp);
  if (w == kAtomics) return "an atomic operation";
  if (w == kSeveralThreadgroups) return "more than one threadgroup";
  if (w == kSeveralSimdgroups) return "more than one simdgroup";
  if (w >= kSeveralOfSimdgroup) {
    return "more than one lane of simdgroup " + std::to_string(w - kSeveralOfSimdgroup);
  }
  Thread other = thread;
  place_threadgroup(other, threadgroup);
  place_thread(other, w);
  return describe_thread(other);
}

bool DispatchRun::is_in_kernel_image(uintptr_t address) {
  std::call_once(image_once_, [this] {
    dl_iterate_phdr(
        [](dl_phdr_info* object, size_t, void* data) {
          auto* run = static_cast<DispatchRun*>(data);
          const uintptr_t entry = reinterpret_cast<uintptr_t>(run->entry);
          uintptr_t begin = UINTPTR_MAX, end = 0;
          for (int i = 0; i < object->dlpi_phnum; ++i) {
            const auto& segment = object->dlpi_phdr[i];
            if (segment.p_type != PT_LOAD) continue;
            const uintptr_t first = object->dlpi_addr + segment.p_vaddr;
            begin = std::min(begin, first);
            end = std::max(end, first + segment.p_memsz);
          }
          if (entry < begin || entry >= end) return 0;
          run->image_begin_ = begin;
          run->image_end_ = end;
          return 1;
        },
        this);
  });
  return address >= image_begin_ && address < image_end_;
}

std::optional<uint64_t> DispatchRun::take_position() {
  const uint64_t position = next_position_.fetch_add(1, std::memory_order_relaxed);
  if (position >= num_threadgroups || is_cancelled(position)) return std::nullopt;
  return position;
}

void DispatchRun::report(uint64_t position, std::string message) {
  const std::lock_guard lock(fault_mutex_);
  if (!is_cancelled(position) && position != fault_position_.load()) {
    fault_position_ = position;
    fault_ = Fault{info.name, std::move(message)};
  }
}

}  // namespace sim
