#include "dispatch_run.h"

namespace sim {
namespace {

uint32_t divide_up(uint32_t x, uint32_t y) { return x / y + (x % y != 0); }

}  // namespace

DispatchRun::DispatchRun(const Dispatch& d, const ExecutorOptions& options)
    : dispatch(d), info(d.kernel->info()), entry(d.kernel->entry()),
      shuffle_seed(options.shuffle_seed) {
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
