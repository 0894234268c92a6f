// MPSCommandBuffer: a command buffer that can be committed and go on with a new one.
#include <MetalPerformanceShaders/MetalPerformanceShaders.h>

#include "objc_object.h"

namespace {

using Root = sim::Strong<id<MTLCommandBuffer>>;

id<MTLCommandBuffer> root_of(MPSCommandBuffer* buffer) {
  return sim::state<Root>(buffer).get();
}

}  // namespace

@implementation MPSCommandBuffer
+ (instancetype)alloc {
  return sim::allocate<Root>(self);
}
+ (instancetype)commandBufferWithCommandBuffer:(id<MTLCommandBuffer>)commandBuffer {
  return [[[self alloc] initWithCommandBuffer:commandBuffer] autorelease];
}
+ (instancetype)commandBufferFromCommandQueue:(id<MTLCommandQueue>)commandQueue {
  return [self commandBufferWithCommandBuffer:[commandQueue commandBuffer]];
}
- (instancetype)initWithCommandBuffer:(id<MTLCommandBuffer>)commandBuffer {
  sim::state<Root>(self) = Root(commandBuffer);
  return self;
}
- (id<MTLCommandBuffer>)commandBuffer {
  return root_of(self);
}
- (id<MTLCommandBuffer>)rootCommandBuffer {
  return root_of(self);
}
- (void)commitAndContinue {
  id<MTLCommandBuffer> done = root_of(self);
  [done commit];
  sim::state<Root>(self) = Root([[done commandQueue] commandBuffer]);
}
- (id<MTLDevice>)device {
  return [root_of(self) device];
}
- (id<MTLCommandQueue>)commandQueue {
  return [root_of(self) commandQueue];
}
- (BOOL)retainedReferences {
  return [root_of(self) retainedReferences];
}
- (NSString*)label {
  return [root_of(self) label];
}
- (void)setLabel:(NSString*)label {
  [root_of(self) setLabel:label];
}
- (CFTimeInterval)kernelStartTime {
  return [root_of(self) kernelStartTime];
}
- (CFTimeInterval)kernelEndTime {
  return [root_of(self) kernelEndTime];
}
- (CFTimeInterval)GPUStartTime {
  return [root_of(self) GPUStartTime];
}
- (CFTimeInterval)GPUEndTime {
  return [root_of(self) GPUEndTime];
}
- (void)enqueue {
  [root_of(self) enqueue];
}
- (void)commit {
  [root_of(self) commit];
}
- (void)addScheduledHandler:(MTLCommandBufferHandler)block {
  [root_of(self) addScheduledHandler:block];
}
- (void)waitUntilScheduled {
  [root_of(self) waitUntilScheduled];
}
- (void)addCompletedHandler:(MTLCommandBufferHandler)block {
  [root_of(self) addCompletedHandler:block];
}
- (void)waitUntilCompleted {
  [root_of(self) waitUntilCompleted];
}
- (MTLCommandBufferStatus)status {
  return [root_of(self) status];
}
- (NSError*)error {
  return [root_of(self) error];
}
- (id<MTLBlitCommandEncoder>)blitCommandEncoder {
  return [root_of(self) blitCommandEncoder];
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoder {
  return [root_of(self) computeCommandEncoder];
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoderWithDescriptor:
    (MTLComputePassDescriptor*)computePassDescriptor {
  return [root_of(self) computeCommandEncoderWithDescriptor:computePassDescriptor];
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoderWithDispatchType:
    (MTLDispatchType)dispatchType {
  return [root_of(self) computeCommandEncoderWithDispatchType:dispatchType];
}
- (void)encodeWaitForEvent:(id<MTLEvent>)event value:(uint64_t)value {
  [root_of(self) encodeWaitForEvent:event value:value];
}
- (void)encodeSignalEvent:(id<MTLEvent>)event value:(uint64_t)value {
  [root_of(self) encodeSignalEvent:event value:value];
}
- (void)pushDebugGroup:(NSString*)string {
  [root_of(self) pushDebugGroup:string];
}
- (void)popDebugGroup {
  [root_of(self) popDebugGroup];
}
@end
