// MTLEvent and MTLSharedEvent.
#include <Block.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "metal_objects.h"
#include "timeline.h"

namespace sim {

EventState::~EventState() {
  event->on_signal = nullptr;   // recorded work may hold the event for longer
  for (const auto& listener : listeners) Block_release(listener.block);
}

namespace {

void notify(SimEvent* event, uint64_t value) {
  auto& from = state<EventState>(event);
  std::vector<Listener> due;
  {
    std::lock_guard lock(from.mutex);
    auto begin = std::partition(from.listeners.begin(), from.listeners.end(),
                                [value](const Listener& one) { return one.value > value; });
    due.assign(begin, from.listeners.end());
    from.listeners.erase(begin, from.listeners.end());
  }
  for (const auto& listener : due) {
    listener.block(event, value);
    Block_release(listener.block);
  }
}

}  // namespace
}  // namespace sim

@implementation SimEvent
- (id<MTLDevice>)device {
  return sim::device();
}
- (NSString*)label {
  return sim::to_ns(sim::state<sim::EventState>(self).label);
}
- (void)setLabel:(NSString*)label {
  sim::state<sim::EventState>(self).label = sim::to_string(label);
}
- (uint64_t)signaledValue {
  return sim::state<sim::EventState>(self).event->value;
}
- (void)setSignaledValue:(uint64_t)value {
  sim::state<sim::EventState>(self).event->value = value;
  sim::notify(self, value);
}
- (void)notifyListener:(MTLSharedEventListener*)listener
               atValue:(uint64_t)value
                 block:(MTLSharedEventNotificationBlock)block {
  (void)listener;
  auto& state = sim::state<sim::EventState>(self);
  {
    std::lock_guard lock(state.mutex);
    state.listeners.push_back({value, Block_copy(block)});
    state.event->on_signal = [self](uint64_t signaled) { sim::notify(self, signaled); };
  }
  if (state.event->value >= value) sim::notify(self, state.event->value);
}
// What has been committed may signal, so it runs first; other threads get the rest of the time.
- (BOOL)waitUntilSignaledValue:(uint64_t)value timeoutMS:(uint64_t)milliseconds {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
  sim::run_all();
  while ([self signaledValue] < value) {
    if (std::chrono::steady_clock::now() >= deadline) return NO;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    sim::run_all();
  }
  return YES;
}
@end

@implementation MTLSharedEventListener
+ (instancetype)alloc {
  return sim::allocate<dispatch_queue_t>(self);
}
- (instancetype)init {
  sim::state<dispatch_queue_t>(self) = dispatch_queue_create("shared event", nullptr);
  return self;
}
- (instancetype)initWithDispatchQueue:(dispatch_queue_t)dispatchQueue {
  dispatch_retain(dispatchQueue);
  sim::state<dispatch_queue_t>(self) = dispatchQueue;
  return self;
}
- (dispatch_queue_t)dispatchQueue {
  return sim::state<dispatch_queue_t>(self);
}
- (void)dealloc {
  dispatch_release(sim::state<dispatch_queue_t>(self));
  [super dealloc];
}
@end
