// MTLComputeCommandEncoder and MTLBlitCommandEncoder: Objective-C's face of encoders.h.
#include "device_state.h"
#include "metal_objects.h"

namespace sim {
namespace {

ComputeEncoder& compute(id encoder) {
  return *state<ComputeEncoderState>(encoder).encoder;
}
BlitEncoder& blit(id encoder) {
  return *state<BlitEncoderState>(encoder).encoder;
}

Extent extent(MTLSize size) {
  return {static_cast<uint32_t>(size.width), static_cast<uint32_t>(size.height),
          static_cast<uint32_t>(size.depth)};
}

}  // namespace
}  // namespace sim

@implementation SimComputeEncoder
- (id<MTLDevice>)device {
  return sim::device();
}
- (NSString*)label {
  return sim::to_ns(sim::state<sim::ComputeEncoderState>(self).label);
}
- (void)setLabel:(NSString*)label {
  sim::state<sim::ComputeEncoderState>(self).label = sim::to_string(label);
}
- (void)endEncoding {
  sim::compute(self).end();
}
- (void)insertDebugSignpost:(NSString*)string {
  (void)string;
}
- (void)pushDebugGroup:(NSString*)string {
  (void)string;
}
- (void)popDebugGroup {
}
- (MTLDispatchType)dispatchType {
  return sim::compute(self).is_concurrent() ? MTLDispatchTypeConcurrent : MTLDispatchTypeSerial;
}
- (void)setComputePipelineState:(id<MTLComputePipelineState>)state {
  sim::compute(self).set_pipeline(state ? sim::state<std::shared_ptr<sim::Pipeline>>(state)
                                        : nullptr);
}
- (void)setBytes:(const void*)bytes length:(NSUInteger)length atIndex:(NSUInteger)index {
  sim::compute(self).set_bytes(bytes, length, index);
}
- (void)setBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)index {
  sim::compute(self).set_buffer(sim::buffer_ref(buffer), offset, index);
}
- (void)setBufferOffset:(NSUInteger)offset atIndex:(NSUInteger)index {
  sim::compute(self).set_buffer_offset(offset, index);
}
- (void)setBuffers:(const id<MTLBuffer>[])buffers
           offsets:(const NSUInteger[])offsets
         withRange:(NSRange)range {
  for (NSUInteger i = 0; i < range.length; ++i) {
    [self setBuffer:buffers[i] offset:offsets[i] atIndex:range.location + i];
  }
}
- (void)setThreadgroupMemoryLength:(NSUInteger)length atIndex:(NSUInteger)index {
  sim::compute(self).set_threadgroup_memory(length, index);
}
- (void)dispatchThreadgroups:(MTLSize)threadgroupsPerGrid
       threadsPerThreadgroup:(MTLSize)threadsPerThreadgroup {
  sim::compute(self).dispatch_threadgroups(sim::extent(threadgroupsPerGrid),
                                           sim::extent(threadsPerThreadgroup));
}
- (void)dispatchThreads:(MTLSize)threadsPerGrid
    threadsPerThreadgroup:(MTLSize)threadsPerThreadgroup {
  sim::compute(self).dispatch_threads(sim::extent(threadsPerGrid),
                                      sim::extent(threadsPerThreadgroup));
}
- (void)useResource:(id<MTLResource>)resource usage:(MTLResourceUsage)usage {
  (void)resource, (void)usage;
}
- (void)useResources:(const id<MTLResource>[])resources
               count:(NSUInteger)count
               usage:(MTLResourceUsage)usage {
  (void)resources, (void)count, (void)usage;
}
- (void)memoryBarrierWithScope:(MTLBarrierScope)scope {
  if (scope & MTLBarrierScopeBuffers) sim::compute(self).barrier();
}
- (void)memoryBarrierWithResources:(const id<MTLResource>[])resources count:(NSUInteger)count {
  std::vector<sim::BufferRef> buffers;
  for (NSUInteger i = 0; i < count; ++i) {
    buffers.push_back(sim::buffer_ref(static_cast<id<MTLBuffer>>(resources[i])));
  }
  sim::compute(self).barrier(buffers);
}
@end

@implementation SimBlitEncoder
- (id<MTLDevice>)device {
  return sim::device();
}
- (NSString*)label {
  return sim::to_ns(sim::state<sim::BlitEncoderState>(self).label);
}
- (void)setLabel:(NSString*)label {
  sim::state<sim::BlitEncoderState>(self).label = sim::to_string(label);
}
- (void)endEncoding {
  sim::blit(self).end();
}
- (void)insertDebugSignpost:(NSString*)string {
  (void)string;
}
- (void)pushDebugGroup:(NSString*)string {
  (void)string;
}
- (void)popDebugGroup {
}
- (void)synchronizeResource:(id<MTLResource>)resource {
  (void)resource;
}
- (void)fillBuffer:(id<MTLBuffer>)buffer range:(NSRange)range value:(uint8_t)value {
  sim::blit(self).fill(sim::buffer_ref(buffer), range.location, range.length, value);
}
- (void)copyFromBuffer:(id<MTLBuffer>)sourceBuffer
          sourceOffset:(NSUInteger)sourceOffset
              toBuffer:(id<MTLBuffer>)destinationBuffer
     destinationOffset:(NSUInteger)destinationOffset
                  size:(NSUInteger)size {
  sim::blit(self).copy(sim::buffer_ref(sourceBuffer), sourceOffset,
                       sim::buffer_ref(destinationBuffer), destinationOffset, size);
}
@end
