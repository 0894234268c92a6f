// MTLDevice: the simulated GPU.
#include <Block.h>

#include <cstring>

#include "device_state.h"
#include "metal_objects.h"

namespace sim {

id<MTLDevice> device() {
  static SimDevice* const instance = [SimDevice new];
  return instance;
}

NSError* make_error(NSErrorDomain domain, NSInteger code, const std::string& description) {
  NSDictionary* info = [NSDictionary dictionaryWithObject:to_ns(description)
                                                   forKey:NSLocalizedDescriptionKey];
  return [NSError errorWithDomain:domain code:code userInfo:info];
}

namespace {

constexpr NSUInteger kMaxBufferBytes = NSUInteger{16} << 30;
constexpr uint64_t kWorkingSetBytes = uint64_t{16} << 30;

id<MTLLibrary> refuse_binary(NSError** error) {
  set_error(error, MTLLibraryErrorDomain, MTLLibraryErrorUnsupported,
            "the simulated Metal device compiles MSL source; it cannot load a compiled metallib");
  return nil;
}

}  // namespace
}  // namespace sim

id<MTLDevice> MTLCreateSystemDefaultDevice() {
  return [sim::device() retain];
}

NSArray<id<MTLDevice>>* MTLCopyAllDevices() {
  return [[NSArray arrayWithObject:sim::device()] retain];
}

@implementation SimDevice
- (NSString*)name {
  return @"Simulated Apple GPU";
}
- (uint64_t)registryID {
  return 1;
}
- (MTLSize)maxThreadsPerThreadgroup {
  constexpr NSUInteger limit = sim::kMaxThreadsPerThreadgroup;
  return MTLSizeMake(limit, limit, limit);
}
- (BOOL)hasUnifiedMemory {
  return YES;
}
- (uint64_t)recommendedMaxWorkingSetSize {
  return sim::kWorkingSetBytes;
}
- (NSUInteger)maxThreadgroupMemoryLength {
  return sim::kMaxThreadgroupBytes;
}
- (NSUInteger)currentAllocatedSize {
  return sim::stats().bytes_allocated;
}
- (NSUInteger)maxBufferLength {
  return sim::kMaxBufferBytes;
}
- (BOOL)supportsFamily:(MTLGPUFamily)gpuFamily {
  const NSInteger apple = gpuFamily - MTLGPUFamilyApple1 + 1;
  if (apple >= 1 && apple < 100) return apple <= sim::gpu_family();
  switch (gpuFamily) {
    case MTLGPUFamilyMac2:
    case MTLGPUFamilyCommon1:
    case MTLGPUFamilyCommon2:
    case MTLGPUFamilyCommon3:
    case MTLGPUFamilyMetal3: return YES;
    default: return NO;
  }
}
- (id<MTLCommandQueue>)newCommandQueue {
  return sim::allocate<sim::QueueState>([SimCommandQueue class]);
}
- (id<MTLCommandQueue>)newCommandQueueWithMaxCommandBufferCount:(NSUInteger)maxCommandBufferCount {
  (void)maxCommandBufferCount;
  return [self newCommandQueue];
}
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options {
  if (length == 0 || length > sim::kMaxBufferBytes) {
    sim::report_fault("newBufferWithLength: expected 1 to " + std::to_string(sim::kMaxBufferBytes) +
                      " bytes, found " + std::to_string(length));
    return nil;
  }
  return sim::make_buffer(sim::Storage::allocate(length), options);
}
- (id<MTLBuffer>)newBufferWithBytes:(const void*)pointer
                             length:(NSUInteger)length
                            options:(MTLResourceOptions)options {
  id<MTLBuffer> buffer = [self newBufferWithLength:length options:options];
  if (buffer) std::memcpy([buffer contents], pointer, length);
  return buffer;
}
- (id<MTLBuffer>)newBufferWithBytesNoCopy:(void*)pointer
                                   length:(NSUInteger)length
                                  options:(MTLResourceOptions)options
                              deallocator:(void (^)(void* pointer, NSUInteger length))deallocator {
  void (^block)(void*, NSUInteger) = nil;
  if (deallocator) block = Block_copy(deallocator);
  auto release = [pointer, length, block] {
    if (!block) return;
    block(pointer, length);
    Block_release(block);
  };
  return sim::make_buffer(sim::Storage::adopt(pointer, length, release), options);
}
- (id<MTLLibrary>)newLibraryWithURL:(NSURL*)url error:(NSError**)error {
  (void)url;
  return sim::refuse_binary(error);
}
- (id<MTLLibrary>)newLibraryWithData:(dispatch_data_t)data error:(NSError**)error {
  (void)data;
  return sim::refuse_binary(error);
}
- (id<MTLLibrary>)newLibraryWithSource:(NSString*)source
                               options:(MTLCompileOptions*)options
                                 error:(NSError**)error {
  try {
    auto library = sim::Library::from_source(sim::to_string(source), sim::compile_options(options));
    id object = sim::allocate<sim::LibraryState>([SimLibrary class]);
    sim::state<sim::LibraryState>(object).library = std::move(library);
    return object;
  } catch (const std::exception& failure) {
    sim::set_error(error, MTLLibraryErrorDomain, MTLLibraryErrorCompileFailure, failure.what());
    return nil;
  }
}
- (id<MTLComputePipelineState>)newComputePipelineStateWithFunction:(id<MTLFunction>)computeFunction
                                                             error:(NSError**)error {
  return sim::make_pipeline(computeFunction, [computeFunction label], 0, error);
}
- (id<MTLComputePipelineState>)
    newComputePipelineStateWithDescriptor:(MTLComputePipelineDescriptor*)descriptor
                                  options:(MTLPipelineOption)options
                               reflection:(MTLAutoreleasedComputePipelineReflection*)reflection
                                    error:(NSError**)error {
  (void)options;
  if (reflection) *reflection = nil;
  return sim::make_pipeline([descriptor computeFunction], [descriptor label],
                            [descriptor maxTotalThreadsPerThreadgroup], error);
}
- (id<MTLEvent>)newEvent {
  return [self newSharedEvent];
}
- (id<MTLSharedEvent>)newSharedEvent {
  return sim::allocate<sim::EventState>([SimEvent class]);
}
@end
