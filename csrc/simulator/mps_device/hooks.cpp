// How PyTorch finds the device: hooks, device guard, autograd threads.
#include <ATen/detail/MPSHooksInterface.h>
#include <ATen/mps/MPSGeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/engine.h>

#include <chrono>
#include <map>
#include <mutex>

#include "allocator.h"
#include "buffers.h"
#include "hooks.h"
#include "stream.h"

namespace sim {
namespace {

const c10::Device kDevice{c10::DeviceType::MPS, 0};
const c10::Stream kStream{c10::Stream::DEFAULT, kDevice};

// An event is the moment by which all work before it had run: recording one waits for that work.
struct Event {
  std::optional<std::chrono::steady_clock::time_point> time;

  void record() {
    wait_for_device();
    time = std::chrono::steady_clock::now();
  }
  double milliseconds_until(const Event& end) const {
    TORCH_CHECK(time && end.time, "Both events must be recorded before calculating elapsed time.");
    return std::chrono::duration<double, std::milli>(*end.time - *time).count();
  }
};

class EventTable {
 public:
  uint32_t acquire() {
    std::lock_guard lock(mutex_);
    events_[++last_id_];
    return last_id_;
  }
  void release(uint32_t id) {
    std::lock_guard lock(mutex_);
    events_.erase(id);
  }
  Event& operator[](uint32_t id) {
    std::lock_guard lock(mutex_);
    auto found = events_.find(id);
    TORCH_CHECK(found != events_.end(), "expected the id of an mps event, got ", id);
    return found->second;
  }

 private:
  std::mutex mutex_;
  std::map<uint32_t, Event> events_;
  uint32_t last_id_ = 0;
};

EventTable& events() {
  static auto* table = new EventTable;
  return *table;
}

struct Hooks final : at::MPSHooksInterface {
  void init() const override {}
  bool hasMPS() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isOnMacOSorNewer(unsigned major, unsigned) const override { return major <= 15; }
  c10::Device getDeviceFromPtr(void*) const override { return kDevice; }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::mps::detail::getDefaultMPSGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::mps::detail::createMPSGenerator();
  }

  void deviceSynchronize() const override { wait_for_device(); }
  void commitStream() const override { commit_stream(); }
  void* getCommandBuffer() const override { return stream_command_buffer(); }
  void* getDispatchQueue() const override { return stream_dispatch_queue(); }

  c10::Allocator* getMPSDeviceAllocator() const override { return device_allocator(); }
  void emptyCache() const override {}
  size_t getCurrentAllocatedMemory() const override {
    return device_allocator()->getCurrentAllocatedMemory();
  }
  size_t getDriverAllocatedMemory() const override {
    return device_allocator()->getDriverAllocatedMemory();
  }
  size_t getRecommendedMaxMemory() const override { return recommended_max_memory(); }
  size_t getMaxBufferLength() const override { return max_buffer_length(); }
  void setMemoryFraction(double fraction) const override { set_memory_fraction(fraction); }
  bool isPinnedPtr(const void* data) const override { return at::mps::isMPSPinnedPtr(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }

  // Nothing is traced; what the simulator measures is read from torch_flash_mps.simulator.
  void profilerStartTrace(const std::string&, bool) const override {}
  void profilerStopTrace() const override {}

  uint32_t acquireEvent(bool) const override { return events().acquire(); }
  void releaseEvent(uint32_t id) const override { events().release(id); }
  void recordEvent(uint32_t id) const override { events()[id].record(); }
  void waitForEvent(uint32_t) const override {}
  void synchronizeEvent(uint32_t) const override {}
  bool queryEvent(uint32_t) const override { return true; }
  double elapsedTimeOfEvents(uint32_t start, uint32_t end) const override {
    return events()[start].milliseconds_until(events()[end]);
  }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::MPS;

  c10::DeviceType type() const override { return static_type; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.is_mps(), "Expected a MPS device, but got ", device);
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return kStream; }
  c10::Stream getNewStream(c10::Device, int) const override { return kStream; }
  c10::Stream getDefaultStream(c10::Device) const override { return kStream; }
  c10::Stream exchangeStream(c10::Stream) const override { return kStream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void synchronizeDevice(c10::DeviceIndex) const override { wait_for_device(); }
  void synchronizeStream(const c10::Stream&) const override { wait_for_device(); }
  bool queryStream(const c10::Stream&) const override { return true; }

  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->record();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* start, void* end, c10::DeviceIndex) const override {
    return static_cast<Event*>(start)->milliseconds_until(*static_cast<Event*>(end));
  }
};

// PyTorch asks the registry once and keeps the answer. A process that asked before we were loaded
// holds the hooks of a torch without MPS: they have no state, so ours take their place.
void install_hooks() {
  auto& hooks = at::detail::getMPSHooks();
  if (hooks.hasMPS()) return;
  static_assert(sizeof(Hooks) == sizeof(at::MPSHooksInterface));
  new (const_cast<at::MPSHooksInterface*>(&hooks)) Hooks;
}

// Likewise an autograd engine that has run a backward pass has no thread for our device.
struct EngineAccess : torch::autograd::Engine {
  static void start_late_threads() {
    auto& engine = torch::autograd::Engine::get_default_engine();
    const bool started = (engine.*&EngineAccess::thread_pool_shared_) != nullptr;
    if (started && (engine.*&EngineAccess::device_ready_queues_).empty()) {
      (engine.*&EngineAccess::start_device_threads)();
    }
  }
};

C10_REGISTER_GUARD_IMPL(MPS, Guard)

}  // namespace

void join_torch() {
  install_hooks();
  EngineAccess::start_late_threads();
}

}  // namespace sim

namespace at {

using SimulatedHooks = sim::Hooks;
C10_REGISTER_CLASS(MPSHooksRegistry, MPSHooks, SimulatedHooks)

}  // namespace at
