// MTLComputePipelineState and its descriptor.
#include "metal_objects.h"

namespace {

struct Descriptor {
  sim::Strong<NSString*> label;
  sim::Strong<id<MTLFunction>> function;
  BOOL is_multiple_of_width = NO;
  NSUInteger max_threads = 0;
};

sim::Pipeline& pipeline_of(id state) {
  return *sim::state<std::shared_ptr<sim::Pipeline>>(state);
}

}  // namespace

@implementation SimPipelineState
- (NSString*)label {
  return sim::to_ns(pipeline_of(self).label);
}
- (id<MTLDevice>)device {
  return sim::device();
}
- (NSUInteger)allocatedSize {
  return 0;
}
- (NSUInteger)maxTotalThreadsPerThreadgroup {
  return pipeline_of(self).max_threads;
}
- (NSUInteger)threadExecutionWidth {
  return sim::kSimdWidth;
}
- (NSUInteger)staticThreadgroupMemoryLength {
  return pipeline_of(self).info().static_threadgroup_bytes;
}
@end

@implementation MTLComputePipelineReflection
@end

@implementation MTLComputePipelineDescriptor
+ (instancetype)alloc {
  return sim::allocate<Descriptor>(self);
}
- (NSString*)label {
  return sim::state<Descriptor>(self).label.get();
}
- (void)setLabel:(NSString*)label {
  sim::state<Descriptor>(self).label = sim::Strong(label);
}
- (id<MTLFunction>)computeFunction {
  return sim::state<Descriptor>(self).function.get();
}
- (void)setComputeFunction:(id<MTLFunction>)function {
  sim::state<Descriptor>(self).function = sim::Strong(function);
}
- (BOOL)threadGroupSizeIsMultipleOfThreadExecutionWidth {
  return sim::state<Descriptor>(self).is_multiple_of_width;
}
- (void)setThreadGroupSizeIsMultipleOfThreadExecutionWidth:(BOOL)isMultiple {
  sim::state<Descriptor>(self).is_multiple_of_width = isMultiple;
}
- (NSUInteger)maxTotalThreadsPerThreadgroup {
  return sim::state<Descriptor>(self).max_threads;
}
- (void)setMaxTotalThreadsPerThreadgroup:(NSUInteger)threads {
  sim::state<Descriptor>(self).max_threads = threads;
}
- (void)reset {
  sim::state<Descriptor>(self) = {};
}
- (id)copyWithZone:(NSZone*)zone {
  (void)zone;
  id copy = [[self class] new];
  sim::state<Descriptor>(copy) = sim::state<Descriptor>(self);
  return copy;
}
@end
