#include "allocator.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>

#include "buffers.h"
#include "stream.h"

namespace sim {
namespace {

const c10::Device kDevice{c10::DeviceType::MPS, 0};

using c10::CachingAllocator::StatType;

// Totals since the process began, and the peak; one lock, because torch reads them together.
class Usage {
 public:
  void allocated(size_t bytes) {
    std::lock_guard lock(mutex_);
    aggregate(StatType::AGGREGATE, stats_.allocation).increase(1);
    aggregate(StatType::AGGREGATE, stats_.allocated_bytes).increase(bytes);
  }
  void freed(size_t bytes) {
    std::lock_guard lock(mutex_);
    aggregate(StatType::AGGREGATE, stats_.allocation).decrease(1);
    aggregate(StatType::AGGREGATE, stats_.allocated_bytes).decrease(bytes);
  }
  // There is no pool: what is allocated is also what is active, reserved and requested.
  c10::CachingDeviceAllocator::DeviceStats snapshot() {
    std::lock_guard lock(mutex_);
    auto stats = stats_;
    stats.active = stats.segment = stats.allocation;
    stats.active_bytes = stats.reserved_bytes = stats.requested_bytes = stats.allocated_bytes;
    return stats;
  }
  size_t current() {
    std::lock_guard lock(mutex_);
    return aggregate(StatType::AGGREGATE, stats_.allocated_bytes).current;
  }
  void reset_peak() {
    std::lock_guard lock(mutex_);
    aggregate(StatType::AGGREGATE, stats_.allocation).reset_peak();
    aggregate(StatType::AGGREGATE, stats_.allocated_bytes).reset_peak();
  }
  void reset_accumulated() {
    std::lock_guard lock(mutex_);
    aggregate(StatType::AGGREGATE, stats_.allocation).reset_accumulated();
    aggregate(StatType::AGGREGATE, stats_.allocated_bytes).reset_accumulated();
  }

 private:
  static c10::CachingAllocator::Stat& aggregate(StatType type,
                                                c10::CachingAllocator::StatArray& a) {
    return a[static_cast<size_t>(type)];
  }
  std::mutex mutex_;
  c10::CachingDeviceAllocator::DeviceStats stats_;
};

// Never destroyed: storages of torch's own static objects may outlive ours.
Usage& usage() {
  static auto* instance = new Usage;
  return *instance;
}

std::atomic<size_t> memory_limit{SIZE_MAX};

void* allocate_buffer(size_t nbytes) {
  const size_t used = usage().current();
  const size_t limit = memory_limit.load(std::memory_order_relaxed);
  void* buffer = nbytes <= limit - std::min(used, limit) ? new_buffer(nbytes) : nullptr;
  TORCH_CHECK_WITH(OutOfMemoryError, buffer, "MPS backend out of memory (MPS allocated: ", used,
                   " bytes, max allowed: ", limit == SIZE_MAX ? "unlimited" : std::to_string(limit),
                   "). Tried to allocate ", nbytes, " bytes.");
  usage().allocated(nbytes);
  return buffer;
}

void free_buffer(void* buffer) {
  if (!buffer) return;
  usage().freed(buffer_length(buffer));
  release_buffer(buffer);
}

class DeviceAllocator final : public at::mps::IMPSAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    void* buffer = nbytes == 0 ? nullptr : allocate_buffer(nbytes);
    return {buffer, buffer, &free_buffer, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_buffer; }
  void copy_data(void* destination, const void* source, size_t count) const override {
    wait_for_device();
    std::memcpy(buffer_contents(destination), buffer_contents(source), count);
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    return usage().snapshot();
  }
  void resetAccumulatedStats(c10::DeviceIndex) override { usage().reset_accumulated(); }
  void resetPeakStats(c10::DeviceIndex) override { usage().reset_peak(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    const size_t total = sim::recommended_max_memory(), used = usage().current();
    return {total - std::min(used, total), total};
  }

  void freeInactiveBuffers() const override {}
  ssize_t getUnalignedBufferSize(const void* buffer) const override {
    return static_cast<ssize_t>(buffer_length(buffer));
  }
  // Shapes of buffers serve PyTorch's graph cache, which does not exist here.
  c10::IntArrayRef getBufferShape(const void*) const override { return {}; }
  void setBufferShape(const void*, const c10::IntArrayRef&) const override {}
  id_t getBufferId(const void* buffer) const override {
    return static_cast<id_t>(reinterpret_cast<uintptr_t>(buffer));
  }
  bool isSharedBuffer(const void*) const override { return true; }
  c10::DataPtr allocScalarBufferWithValue(void* value, size_t size) const override {
    void* buffer = allocate_buffer(size);
    std::memcpy(buffer_contents(buffer), value, size);
    return {buffer, buffer, &free_buffer, kDevice};
  }
  std::string formatSize(size_t size) const override { return std::to_string(size) + " bytes"; }
  void setLowWatermarkRatio(double) const override {}
  void setHighWatermarkRatio(double ratio) const override { set_memory_fraction(ratio); }
  ssize_t getLowWatermarkValue() const override {
    return static_cast<ssize_t>(getLowWatermarkLimit() - getTotalAllocatedMemory());
  }
  size_t getLowWatermarkLimit() const override { return sim::recommended_max_memory(); }
  size_t getHighWatermarkLimit() const override { return memory_limit; }
  size_t getTotalAllocatedMemory() const override { return usage().current(); }
  size_t getCurrentAllocatedMemory() const override { return usage().current(); }
  size_t getDriverAllocatedMemory() const override { return usage().current(); }
  size_t getRecommendedMaxMemory() const override { return sim::recommended_max_memory(); }
  std::pair<const void*, uint32_t> getSharedBufferPtr(const void* buffer) const override {
    return {buffer_contents(buffer), 1};
  }
  c10::Storage getHostAliasStorage(const c10::Storage& mps_storage) const override {
    TORCH_CHECK(mps_storage.device_type() == c10::DeviceType::MPS,
                "getHostAliasStorage: expected an mps storage, got one on ", mps_storage.device());
    auto* owner = new c10::Storage(mps_storage);
    c10::DataPtr alias{host_data(*mps_storage.unsafeGetStorageImpl()), owner,
                       [](void* storage) { delete static_cast<c10::Storage*>(storage); },
                       c10::DeviceType::CPU};
    return c10::Storage(c10::Storage::use_byte_size_t{}, mps_storage.nbytes(), std::move(alias));
  }
  bool recordEvents(c10::ArrayRef<const void*>) const override { return false; }
  bool waitForEvents(c10::ArrayRef<const void*>) const override { return false; }
};

// Pinned memory: host memory that is also a buffer, known by its address.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &release, c10::DeviceType::CPU};
    void* buffer = allocate_buffer(nbytes);
    auto* begin = static_cast<const char*>(buffer_contents(buffer));
    std::lock_guard lock(mutex);
    ranges[begin] = begin + nbytes;
    return {const_cast<char*>(begin), buffer, &release, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* destination, const void* source, size_t count) const override {
    default_copy_data(destination, source, count);
  }
  static bool owns(const void* pointer) {
    std::lock_guard lock(mutex);
    auto after = ranges.upper_bound(static_cast<const char*>(pointer));
    return after != ranges.begin() && pointer < std::prev(after)->second;
  }

 private:
  static void release(void* buffer) {
    if (!buffer) return;
    {
      std::lock_guard lock(mutex);
      ranges.erase(static_cast<const char*>(buffer_contents(buffer)));
    }
    free_buffer(buffer);
  }
  static inline std::mutex mutex;
  static inline std::map<const char*, const char*> ranges;
};

}  // namespace

at::mps::IMPSAllocator* device_allocator() {
  static auto* allocator = new DeviceAllocator;
  return allocator;
}

c10::Allocator* pinned_allocator() {
  static auto* allocator = new PinnedAllocator;
  return allocator;
}

void set_memory_fraction(double fraction) {
  memory_limit =
      fraction == 0.0 ? SIZE_MAX : static_cast<size_t>(fraction * recommended_max_memory());
}

void* host_data(const c10::StorageImpl& storage) {
  const void* buffer = storage.data();
  return buffer ? buffer_contents(buffer) : nullptr;
}

void resize_storage(c10::StorageImpl& storage, size_t nbytes) {
  TORCH_CHECK(storage.resizable(), "Trying to resize storage that is not resizable");
  wait_for_device();
  auto data = device_allocator()->allocate(nbytes);
  if (const size_t kept = std::min(nbytes, storage.nbytes())) {
    std::memcpy(buffer_contents(data.get()), host_data(storage), kept);
  }
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(nbytes);
}

}  // namespace sim

namespace at::mps {

TORCH_API at::Allocator* GetMPSAllocator() {
  return sim::device_allocator();
}
IMPSAllocator* getIMPSAllocator() {
  return sim::device_allocator();
}
bool isMPSPinnedPtr(const void* data) {
  return sim::PinnedAllocator::owns(data);
}

C10_DEFINE_REGISTRY(MPSAllocatorCallbacksRegistry, IMpsAllocatorCallback)

namespace {
const bool registered = [] {
  c10::SetAllocator(c10::DeviceType::MPS, sim::device_allocator());
  return true;
}();
}  // namespace

}  // namespace at::mps
