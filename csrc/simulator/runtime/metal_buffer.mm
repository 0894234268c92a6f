// MTLBuffer.
#include <stdexcept>

#include "device_state.h"
#include "metal_objects.h"

namespace sim {
namespace {

constexpr MTLResourceOptions kStorageMask = 0xF0;
constexpr MTLResourceOptions kHazardMask = 0x300;

Storage& storage_of(id buffer) {
  return *state<BufferState>(buffer).storage;
}

}  // namespace

BufferState::~BufferState() {
  if (!storage) return;
  count_bytes(-static_cast<int64_t>(storage->length()));
  storage->retire();
}

id<MTLBuffer> make_buffer(std::shared_ptr<Storage> storage, MTLResourceOptions options) {
  if (!storage) return nil;
  count_bytes(static_cast<int64_t>(storage->length()));
  id buffer = allocate<BufferState>([SimBuffer class]);
  state<BufferState>(buffer).storage = std::move(storage);
  state<BufferState>(buffer).options = options;
  return buffer;
}

BufferRef buffer_ref(id<MTLBuffer> buffer) {
  if (!buffer) return {};
  if ([buffer class] != [SimBuffer class]) {
    throw std::invalid_argument(
        "expected an MTLBuffer of the simulated device, found another object");
  }
  return {state<BufferState>(buffer).storage, static_cast<void*>(buffer)};
}

}  // namespace sim

@implementation SimBuffer
- (NSUInteger)length {
  return sim::storage_of(self).length();
}
- (void*)contents {
  const bool is_private = [self storageMode] == MTLStorageModePrivate;
  return is_private ? nullptr : sim::storage_of(self).contents();
}
- (void)didModifyRange:(NSRange)range {
  if (NSMaxRange(range) > [self length]) {
    sim::report_fault("didModifyRange: expected a range inside " + std::to_string([self length]) +
                      " bytes, found one that ends at " + std::to_string(NSMaxRange(range)));
  }
}
- (uint64_t)gpuAddress {
  return reinterpret_cast<uint64_t>(sim::storage_of(self).contents());
}
- (NSString*)label {
  return sim::to_ns(sim::storage_of(self).label);
}
- (void)setLabel:(NSString*)label {
  sim::storage_of(self).label = sim::to_string(label);
}
- (id<MTLDevice>)device {
  return sim::device();
}
- (NSUInteger)allocatedSize {
  return [self length];
}
- (MTLCPUCacheMode)cpuCacheMode {
  return static_cast<MTLCPUCacheMode>([self resourceOptions] & 0xF);
}
- (MTLStorageMode)storageMode {
  return static_cast<MTLStorageMode>(([self resourceOptions] & sim::kStorageMask) >>
                                     MTLResourceStorageModeShift);
}
- (MTLHazardTrackingMode)hazardTrackingMode {
  const auto mode =
      ([self resourceOptions] & sim::kHazardMask) >> MTLResourceHazardTrackingModeShift;
  return mode ? static_cast<MTLHazardTrackingMode>(mode) : MTLHazardTrackingModeTracked;
}
- (MTLResourceOptions)resourceOptions {
  return sim::state<sim::BufferState>(self).options;
}
- (MTLPurgeableState)setPurgeableState:(MTLPurgeableState)state {
  (void)state;
  return MTLPurgeableStateNonVolatile;
}
@end
