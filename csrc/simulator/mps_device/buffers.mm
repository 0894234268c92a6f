// The device and its buffers, for code that speaks no Objective-C.
#include "buffers.h"

#include <ATen/mps/MPSDevice.h>
#include <Metal/Metal.h>

namespace sim {
namespace {

MTLDevice_t device() {
  return at::mps::MPSDevice::getInstance()->device();
}

id<MTLBuffer> as_buffer(const void* buffer) {
  return __builtin_bit_cast(id<MTLBuffer>, const_cast<void*>(buffer));
}

}  // namespace

void* new_buffer(size_t length) {
  return [device() newBufferWithLength:length options:MTLResourceStorageModeShared];
}

void release_buffer(void* buffer) {
  [as_buffer(buffer) release];
}

void* buffer_contents(const void* buffer) {
  return [as_buffer(buffer) contents];
}

size_t buffer_length(const void* buffer) {
  return [as_buffer(buffer) length];
}

std::string device_name() {
  return at::mps::MPSDevice::getInstance()->getName();
}

unsigned device_core_count() {
  return at::mps::MPSDevice::getInstance()->getCoreCount();
}

size_t recommended_max_memory() {
  return [device() recommendedMaxWorkingSetSize];
}

size_t max_buffer_length() {
  return [device() maxBufferLength];
}

}  // namespace sim
