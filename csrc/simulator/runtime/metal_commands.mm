// MTLCommandQueue and MTLCommandBuffer.
#include <Block.h>

#include "device_state.h"
#include "metal_objects.h"
#include "timeline.h"

NSErrorDomain const MTLCommandBufferErrorDomain = @"MTLCommandBufferErrorDomain";

namespace sim {
namespace {

CommandList& list_of(id buffer) {
  return *state<CommandBufferState>(buffer).list;
}

id<MTLCommandBuffer> make_command_buffer(id<MTLCommandQueue> queue, bool retains_references) {
  id buffer = [allocate<CommandBufferState>([SimCommandBuffer class]) autorelease];
  state<CommandBufferState>(buffer).queue = Strong(queue);
  list_of(buffer).retains_references = retains_references;
  return buffer;
}

// The buffer outlives its handlers: it is retained until they have run.
std::function<void()> handler_call(id<MTLCommandBuffer> buffer, MTLCommandBufferHandler block) {
  return [buffer = [buffer retain], block = Block_copy(block)] {
    block(buffer);
    Block_release(block);
    [buffer release];
  };
}

void wait_for(SimCommandBuffer* buffer, const char* call) {
  const auto list = state<CommandBufferState>(buffer).list;
  if (!run_until(list)) {
    list->fail(std::string(call) +
               ": expected a committed command buffer; on a Mac this waits forever");
  }
}

id<MTLComputeCommandEncoder> make_compute_encoder(SimCommandBuffer* buffer, MTLDispatchType type) {
  auto encoder = std::make_unique<ComputeEncoder>(state<CommandBufferState>(buffer).list,
                                                  type == MTLDispatchTypeConcurrent);
  if (!encoder->is_open()) return nil;
  id object = [allocate<ComputeEncoderState>([SimComputeEncoder class]) autorelease];
  state<ComputeEncoderState>(object).encoder = std::move(encoder);
  return object;
}

}  // namespace
}  // namespace sim

@implementation SimCommandQueue
- (NSString*)label {
  return sim::to_ns(sim::state<sim::QueueState>(self).label);
}
- (void)setLabel:(NSString*)label {
  sim::state<sim::QueueState>(self).label = sim::to_string(label);
}
- (id<MTLDevice>)device {
  return sim::device();
}
- (id<MTLCommandBuffer>)commandBuffer {
  return sim::make_command_buffer(self, true);
}
- (id<MTLCommandBuffer>)commandBufferWithUnretainedReferences {
  return sim::make_command_buffer(self, false);
}
@end

@implementation SimCommandBuffer
- (id<MTLDevice>)device {
  return sim::device();
}
- (id<MTLCommandQueue>)commandQueue {
  return sim::state<sim::CommandBufferState>(self).queue.get();
}
- (BOOL)retainedReferences {
  return sim::list_of(self).retains_references;
}
- (NSString*)label {
  return sim::to_ns(sim::list_of(self).label);
}
- (void)setLabel:(NSString*)label {
  sim::list_of(self).label = sim::to_string(label);
}
- (CFTimeInterval)kernelStartTime {
  return [self GPUStartTime];
}
- (CFTimeInterval)kernelEndTime {
  return [self GPUEndTime];
}
- (CFTimeInterval)GPUStartTime {
  return sim::list_of(self).start_time;
}
- (CFTimeInterval)GPUEndTime {
  return sim::list_of(self).end_time;
}
- (void)enqueue {
  sim::list_of(self).enqueue();
}
- (void)commit {
  sim::list_of(self).commit();
}
- (void)addScheduledHandler:(MTLCommandBufferHandler)block {
  sim::list_of(self).scheduled_handlers.push_back(sim::handler_call(self, block));
}
- (void)waitUntilScheduled {
  if (sim::list_of(self).is_recording()) sim::wait_for(self, "waitUntilScheduled");
}
- (void)addCompletedHandler:(MTLCommandBufferHandler)block {
  sim::list_of(self).completed_handlers.push_back(sim::handler_call(self, block));
}
- (void)waitUntilCompleted {
  sim::wait_for(self, "waitUntilCompleted");
}
// Asking how far the work is lets it go on, so that a loop of questions ends.
- (MTLCommandBufferStatus)status {
  const auto list = sim::state<sim::CommandBufferState>(self).list;
  sim::run_until(list);
  switch (list->status()) {
    case sim::ListStatus::Recording: return MTLCommandBufferStatusNotEnqueued;
    case sim::ListStatus::Enqueued: return MTLCommandBufferStatusEnqueued;
    case sim::ListStatus::Committed: return MTLCommandBufferStatusCommitted;
    case sim::ListStatus::Completed: return MTLCommandBufferStatusCompleted;
    case sim::ListStatus::Failed: return MTLCommandBufferStatusError;
  }
}
- (NSError*)error {
  const auto& list = sim::list_of(self);
  if (list.status() != sim::ListStatus::Failed) return nil;
  return sim::make_error(MTLCommandBufferErrorDomain, MTLCommandBufferErrorInternal, list.failure);
}
- (id<MTLBlitCommandEncoder>)blitCommandEncoder {
  auto encoder = std::make_unique<sim::BlitEncoder>(sim::state<sim::CommandBufferState>(self).list);
  if (!encoder->is_open()) return nil;
  id object = [sim::allocate<sim::BlitEncoderState>([SimBlitEncoder class]) autorelease];
  sim::state<sim::BlitEncoderState>(object).encoder = std::move(encoder);
  return object;
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoder {
  return sim::make_compute_encoder(self, MTLDispatchTypeSerial);
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoderWithDescriptor:
    (MTLComputePassDescriptor*)computePassDescriptor {
  return sim::make_compute_encoder(self, [computePassDescriptor dispatchType]);
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoderWithDispatchType:
    (MTLDispatchType)dispatchType {
  return sim::make_compute_encoder(self, dispatchType);
}
- (void)encodeWaitForEvent:(id<MTLEvent>)event value:(uint64_t)value {
  sim::list_of(self).add_between_passes(
      "encodeWaitForEvent", sim::WaitCommand{sim::state<sim::EventState>(event).event, value});
}
- (void)encodeSignalEvent:(id<MTLEvent>)event value:(uint64_t)value {
  auto& list = sim::list_of(self);
  list.retain(static_cast<void*>(event));
  list.add_between_passes("encodeSignalEvent",
                          sim::SignalCommand{sim::state<sim::EventState>(event).event, value});
}
- (void)pushDebugGroup:(NSString*)string {
  (void)string;
}
- (void)popDebugGroup {
}
@end

@implementation MTLComputePassDescriptor
+ (instancetype)alloc {
  return sim::allocate<MTLDispatchType>(self);
}
+ (MTLComputePassDescriptor*)computePassDescriptor {
  return [[self new] autorelease];
}
- (MTLDispatchType)dispatchType {
  return sim::state<MTLDispatchType>(self);
}
- (void)setDispatchType:(MTLDispatchType)dispatchType {
  sim::state<MTLDispatchType>(self) = dispatchType;
}
- (id)copyWithZone:(NSZone*)zone {
  (void)zone;
  MTLComputePassDescriptor* copy = [[self class] new];
  [copy setDispatchType:[self dispatchType]];
  return copy;
}
@end
