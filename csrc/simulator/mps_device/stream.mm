// PyTorch's at::mps: the device and the stream that host code encodes on, over the simulated Metal.
#include <ATen/mps/MPSStream.h>
#include <c10/metal/error.h>

#include <atomic>
#include <cstdlib>
#include <exception>
#include <string>

#include "runtime/device_state.h"
#include "stream.h"

namespace at::mps {
namespace {

std::atomic<bool> has_pending_work{false};

// Encoders belong to the stream's queue: two threads that encode at once would mix their arguments.
void check_on_queue(dispatch_queue_t queue) {
  if (!sim::checks_enabled()) return;
  if (dispatch_queue_get_label(DISPATCH_CURRENT_QUEUE_LABEL) == dispatch_queue_get_label(queue)) {
    return;
  }
  sim::report_fault(
      "MPSStream::commandEncoder(): expected a call from a block on the stream's dispatch queue, "
      "found one from outside; wrap the encoding in dispatch_sync(stream->queue(), ^{ ... })");
}

// PyTorch's encoders are serial so far. A concurrent one shows whether host code orders its own
// dispatches.
MTLDispatchType dispatch_type() {
  static const bool is_concurrent = std::getenv("TORCH_FLASH_MPS_SIM_CONCURRENT") != nullptr;
  return is_concurrent ? MTLDispatchTypeConcurrent : MTLDispatchTypeSerial;
}

c10::metal::ErrorMessages* errors_in(MTLBuffer_t buffer) {
  return static_cast<c10::metal::ErrorMessages*>([buffer contents]);
}

}  // namespace

MPSDevice* MPSDevice::_device = nullptr;

MPSDevice::MPSDevice() : _mtl_device(MTLCreateSystemDefaultDevice()) {}

MPSDevice::~MPSDevice() {
  [_mtl_device release];
}

MPSDevice* MPSDevice::getInstance() {
  static auto* instance = _device = new MPSDevice;
  return instance;
}

// The simulated machine runs macOS 15.
bool MPSDevice::isMacOS13Plus(MacOSVersion version) const {
  return version <= MacOSVersion::MACOS_VER_15_2_PLUS;
}

std::string MPSDevice::getName() const {
  return [[_mtl_device name] UTF8String];
}

unsigned MPSDevice::getCoreCount() const {
  const auto count = sim::gpu_cores();
  TORCH_INTERNAL_ASSERT(count, "the simulated registry of devices cannot be read");
  return *count;
}

bool is_available() {
  return true;
}

bool is_macos_13_or_newer(MacOSVersion version) {
  return MPSDevice::getInstance()->isMacOS13Plus(version);
}

bool is_apple_family_or_newer(AppleGPUFamily family) {
  return [MPSDevice::getInstance()->device() supportsFamily:static_cast<MTLGPUFamily>(family)];
}

MPSStream::MPSStream(Stream stream) : _stream(stream) {
  TORCH_CHECK(stream.device_type() == DeviceType::MPS, "expected an mps stream, got one on ",
              stream.device());
  _commandQueue = [MPSDevice::getInstance()->device() newCommandQueue];
  _serialQueue = dispatch_queue_create("metal gpu stream", DISPATCH_QUEUE_SERIAL);
}

MPSStream::~MPSStream() {
  endKernelCoalescing();
  [_commandBuffer release];
  [_errorBuffer release];
  [_commandQueue release];
  dispatch_release(_serialQueue);
}

MPSCommandBuffer_t MPSStream::commandBuffer() {
  if (!_commandBuffer) {
    @autoreleasepool {
      _commandBuffer = [[MPSCommandBuffer commandBufferFromCommandQueue:_commandQueue] retain];
    }
  }
  has_pending_work = true;
  return _commandBuffer;
}

// Kernels share one encoder until somebody needs the command buffer for something else.
MTLComputeCommandEncoder_t MPSStream::commandEncoder() {
  check_on_queue(_serialQueue);
  if (!_commandEncoder) {
    @autoreleasepool {
      _commandEncoder =
          [[commandBuffer() computeCommandEncoderWithDispatchType:dispatch_type()] retain];
    }
  }
  return _commandEncoder;
}

void MPSStream::endKernelCoalescing() {
  [_commandEncoder endEncoding];
  [_commandEncoder release];
  _commandEncoder = nil;
}

void MPSStream::synchronize(SyncType sync_type) {
  endKernelCoalescing();
  switch (sync_type) {
    case SyncType::NONE:
    case SyncType::COMMIT_ADAPTIVE:  // commits under memory pressure, which is not simulated
      break;
    case SyncType::COMMIT: commit(); break;
    case SyncType::COMMIT_AND_WAIT: commitAndWait(); break;
    case SyncType::COMMIT_AND_CONTINUE: commitAndContinue(); break;
  }
}

void MPSStream::commit() {
  if (_commandBuffer) commitAndContinue();
}

void MPSStream::commitAndContinue() {
  [commandBuffer() commitAndContinue];
}

void MPSStream::commitAndWait() {
  if (_commandBuffer) {
    flush();
    [_prevCommandBuffer waitUntilCompleted];
    [_prevCommandBuffer release];
    _prevCommandBuffer = nil;
  }
  has_pending_work = false;
  checkLastError();
}

void MPSStream::flush() {
  [_commandBuffer commit];
  _prevCommandBuffer = _commandBuffer;
  _commandBuffer = nil;
}

void MPSStream::copy(MTLBuffer_t source, MTLBuffer_t destination, size_t length,
                     size_t source_offset, size_t destination_offset, uint64_t,
                     SyncType sync_type) {
  if (length == 0) return;
  dispatch_sync(_serialQueue, ^{
    @autoreleasepool {
      endKernelCoalescing();
      id<MTLBlitCommandEncoder> blit = [commandBuffer() blitCommandEncoder];
      [blit copyFromBuffer:source
               sourceOffset:source_offset
                   toBuffer:destination
          destinationOffset:destination_offset
                       size:length];
      [blit endEncoding];
      synchronize(sync_type);
    }
  });
}

void MPSStream::copy_and_sync(MTLBuffer_t source, MTLBuffer_t destination, size_t length,
                              size_t source_offset, size_t destination_offset, bool non_blocking,
                              uint64_t profile_id) {
  copy(source, destination, length, source_offset, destination_offset, profile_id,
       non_blocking ? SyncType::COMMIT : SyncType::COMMIT_AND_WAIT);
}

void MPSStream::executeMPSGraph(MPSGraph*, NSDictionary*, NSDictionary*, SyncType) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "the simulated Metal device has no MPSGraph");
}

void MPSStream::addCompletedHandler(MTLCommandBufferHandler block) {
  dispatch_sync(_serialQueue, ^{
    @autoreleasepool {
      [commandBuffer() addCompletedHandler:block];
    }
  });
}

MTLDevice_t MPSStream::device() const {
  return [_commandQueue device];
}

// Where kernels that use PyTorch's error reporting leave their messages.
MTLBuffer_t MPSStream::getErrorBuffer() {
  if (!_errorBuffer) {
    _errorBuffer = [device() newBufferWithLength:sizeof(c10::metal::ErrorMessages)
                                         options:MTLResourceStorageModeShared];
    errors_in(_errorBuffer)->count = 0;
  }
  return _errorBuffer;
}

void MPSStream::checkLastError() {
  if (!_errorBuffer || errors_in(_errorBuffer)->count == 0) return;
  const auto& error = errors_in(_errorBuffer)->msg[0];
  const std::string message = std::string(error.message) + " (" + error.func + " at " + error.file +
                              ":" + std::to_string(error.line) + ")";
  errors_in(_errorBuffer)->count = 0;
  sim::report_fault(message);
}

MPSStream* MPSStreamImpl::_stream = nullptr;

MPSStream* MPSStreamImpl::getInstance() {
  static auto* instance = _stream =
      new MPSStream(Stream(Stream::UNSAFE, Device(DeviceType::MPS, 0), 0));
  return instance;
}

MPSStream* getDefaultMPSStream() {
  return MPSStreamImpl::getInstance();
}

MPSStream* getCurrentMPSStream() {
  return getDefaultMPSStream();
}

void dispatch_sync_with_rethrow(dispatch_queue_t queue, void (^block)()) {
  __block std::exception_ptr thrown;
  dispatch_sync(queue, ^{
    try {
      block();
    } catch (...) {
      thrown = std::current_exception();
    }
  });
  if (thrown) std::rethrow_exception(thrown);
}

}  // namespace at::mps

namespace sim {

bool stream_has_pending_work() {
  return at::mps::has_pending_work.load(std::memory_order_acquire);
}

void drain_stream() {
  auto* stream = at::mps::getDefaultMPSStream();
  dispatch_sync(stream->queue(), ^{
    @autoreleasepool {
      stream->synchronize(at::mps::SyncType::COMMIT_AND_WAIT);
    }
  });
}

void commit_stream() {
  auto* stream = at::mps::getDefaultMPSStream();
  dispatch_sync(stream->queue(), ^{
    @autoreleasepool {
      stream->synchronize(at::mps::SyncType::COMMIT);
    }
  });
}

// Extensions that ask for the command buffer open an encoder of their own on it.
void* stream_command_buffer() {
  auto* stream = at::mps::getDefaultMPSStream();
  stream->endKernelCoalescing();
  return stream->commandBuffer();
}

void* stream_dispatch_queue() {
  return at::mps::getDefaultMPSStream()->queue();
}

}  // namespace sim
