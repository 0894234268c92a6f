// Host code as a PyTorch extension for MPS has it, for test_mps_stream.py to call.
#include <ATen/mps/MPSStream.h>
#include <torch/mps.h>

namespace {

id<MTLBuffer> as_buffer(const void* storage) {
  return __builtin_bit_cast(id<MTLBuffer>, const_cast<void*>(storage));
}

}  // namespace

extern "C" {

// Sets the bytes of a storage by a blit on the stream; nothing is committed.
void encode_fill(void* storage, int value) {
  auto* stream = at::mps::getCurrentMPSStream();
  dispatch_sync(stream->queue(), ^{
    @autoreleasepool {
      stream->endKernelCoalescing();
      id<MTLBuffer> buffer = as_buffer(storage);
      id<MTLBlitCommandEncoder> blit = [stream->commandBuffer() blitCommandEncoder];
      [blit fillBuffer:buffer
                 range:NSMakeRange(0, [buffer length])
                 value:static_cast<uint8_t>(value)];
      [blit endEncoding];
    }
  });
}

void encode_copy(void* source, void* destination, size_t length) {
  at::mps::getCurrentMPSStream()->copy(as_buffer(source), as_buffer(destination), length, 0, 0, 0);
}

size_t buffer_length(void* storage) {
  return [as_buffer(storage) length];
}

// The encoder that a block on the stream's queue is given. The caller owns a reference, so that the
// address stays its own.
void* encoder_on_queue(bool end_coalescing) {
  auto* stream = at::mps::getCurrentMPSStream();
  __block void* encoder = nullptr;
  dispatch_sync(stream->queue(), ^{
    if (end_coalescing) stream->endKernelCoalescing();
    encoder = [stream->commandEncoder() retain];
  });
  return encoder;
}

void release_encoder(void* encoder) {
  [__builtin_bit_cast(id<MTLComputeCommandEncoder>, encoder) release];
}

void encoder_outside_queue() {
  at::mps::getCurrentMPSStream()->commandEncoder();
}

void synchronize(int sync_type) {
  auto* stream = at::mps::getCurrentMPSStream();
  dispatch_sync(stream->queue(), ^{
    stream->synchronize(static_cast<at::mps::SyncType>(sync_type));
  });
}

// What an extension that only knows torch/mps.h does: encode on the command buffer, then commit.
void fill_through_public_api(void* storage, int value) {
  @autoreleasepool {
    id<MTLCommandBuffer> commands = torch::mps::get_command_buffer();
    dispatch_sync(torch::mps::get_dispatch_queue(), ^{
      id<MTLBuffer> buffer = as_buffer(storage);
      id<MTLBlitCommandEncoder> blit = [commands blitCommandEncoder];
      [blit fillBuffer:buffer
                 range:NSMakeRange(0, [buffer length])
                 value:static_cast<uint8_t>(value)];
      [blit endEncoding];
    });
    torch::mps::commit();
  }
}

bool rethrows() {
  try {
    at::mps::dispatch_sync_with_rethrow(at::mps::getCurrentMPSStream()->queue(), ^() {
      TORCH_CHECK(false, "from the block");
    });
  } catch (const c10::Error& error) {
    return std::string(error.what_without_backtrace()) == "from the block";
  }
  return false;
}

bool supports_apple(int family) {
  return at::mps::is_apple_family_or_newer(static_cast<at::mps::AppleGPUFamily>(1000 + family));
}

bool is_macos_14_4() {
  return at::mps::is_macos_13_or_newer(at::mps::MacOSVersion::MACOS_VER_14_4_PLUS);
}

}  // extern "C"
