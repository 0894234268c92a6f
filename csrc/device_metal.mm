// Device on Apple's Metal API and PyTorch's MPS stream. Knows no attention. The same file runs on macOS
// and, against csrc/simulator/, on Linux. Reference counting is manual, and no C++ exception leaves it.

#include <ATen/mps/MPSStream.h>
#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

#include <atomic>
#include <exception>
#include <mutex>
#include <unordered_map>

#include "device.h"
#include "metal_language.h"

namespace flash_mps {

namespace {

NSString* to_ns(const std::string& text) {
  return [NSString stringWithUTF8String:text.c_str()];
}

std::string describe(const std::string& kernel, const char* step, NSError* error) {
  const char* reason = error != nil ? [[error localizedDescription] UTF8String] : "no reason given";
  return kernel + ": " + step + " failed: " + reason;
}

// Compiles with IEEE semantics for NaN and infinity: kernels rely on both. Functions that may be
// approximate are called by their fast:: name.
MTLCompileOptions* compile_options() {
  MTLCompileOptions* options = [[[MTLCompileOptions alloc] init] autorelease];
  [options setLanguageVersion:static_cast<MTLLanguageVersion>(kMetalLanguage)];
  if (@available(macOS 15.0, *)) {
    [options setMathMode:MTLMathModeSafe];
  } else {
    [options setFastMathEnabled:NO];
  }
  return options;
}

MTLFunctionConstantValues* constant_values(const KernelSource& source) {
  MTLFunctionConstantValues* values = [[[MTLFunctionConstantValues alloc] init] autorelease];
  for (const auto& [index, value] : source.int_constants) {
    [values setConstantValue:&value type:MTLDataTypeInt atIndex:index];
  }
  for (const auto& [index, value] : source.bool_constants) {
    [values setConstantValue:&value type:MTLDataTypeBool atIndex:index];
  }
  return values;
}

PipelineResult build(id<MTLDevice> device, const KernelSource& source) {
  NSError* error = nil;
  id<MTLLibrary> library = [device newLibraryWithSource:to_ns(source.msl)
                                                options:compile_options()
                                                  error:&error];
  if (library == nil) return {nullptr, describe(source.name, "compiling", error)};
  id<MTLFunction> function = [library newFunctionWithName:to_ns(source.name)
                                           constantValues:constant_values(source)
                                                    error:&error];
  [library release];
  if (function == nil) return {nullptr, describe(source.name, "specialising", error)};
  MTLComputePipelineDescriptor* descriptor = [[MTLComputePipelineDescriptor alloc] init];
  [descriptor setComputeFunction:function];
  [descriptor setLabel:to_ns(source.name)];
  id<MTLComputePipelineState> state =
      [device newComputePipelineStateWithDescriptor:descriptor
                                            options:MTLPipelineOptionNone
                                         reflection:nil
                                              error:&error];
  [descriptor release];
  [function release];
  if (state == nil) return {nullptr, describe(source.name, "making the pipeline", error)};
  return {reinterpret_cast<const Pipeline*>(state), {}};
}

// PyTorch asserts that the registry of devices answers.
int count_cores() {
  try {
    return static_cast<int>(at::mps::MPSDevice::getInstance()->getCoreCount());
  } catch (const std::exception&) {
    return 0;
  }
}

void encode(id<MTLComputeCommandEncoder> encoder, const Launch& launch) {
  if (launch.reads_earlier_launches) [encoder memoryBarrierWithScope:MTLBarrierScopeBuffers];
  [encoder setComputePipelineState:(id<MTLComputePipelineState>)launch.pipeline];
  for (const Binding& binding : launch.bindings) {
    [encoder setBuffer:(id<MTLBuffer>)binding.buffer
                offset:binding.byte_offset
               atIndex:binding.slot];
  }
  [encoder setBytes:launch.params length:launch.params_bytes atIndex:launch.params_slot];
  if (!launch.numbers.empty()) {
    [encoder setBytes:launch.numbers.data()
               length:launch.numbers.size_bytes()
              atIndex:launch.numbers_slot];
  }
  [encoder dispatchThreadgroups:MTLSizeMake(launch.grid.x, launch.grid.y, launch.grid.z)
          threadsPerThreadgroup:MTLSizeMake(launch.threads, 1, 1)];
}

class MetalDevice final : public Device {
 public:
  explicit MetalDevice(id<MTLDevice> device) : device_(device) {}

  std::string name() const override {
    @autoreleasepool {
      return [[device_ name] UTF8String];
    }
  }

  int gpu_family() const override {
    constexpr auto kApple10 = static_cast<MTLGPUFamily>(1010);  // has a name since macOS 26
    for (const MTLGPUFamily family :
         {kApple10, MTLGPUFamilyApple9, MTLGPUFamilyApple8, MTLGPUFamilyApple7}) {
      if ([device_ supportsFamily:family]) return static_cast<int>(family - MTLGPUFamilyApple1) + 1;
    }
    return 0;
  }

  int gpu_cores() override {
    int cores = gpu_cores_;
    if (cores == kNotAsked) gpu_cores_ = cores = count_cores();
    return cores;
  }

  void refresh() override { gpu_cores_ = kNotAsked; }

  PipelineResult pipeline(uint64_t cache_key,
                          const std::function<KernelSource()>& source) override {
    const std::lock_guard lock(mutex_);
    const auto found = pipelines_.find(cache_key);
    if (found != pipelines_.end()) return {found->second, {}};
    @autoreleasepool {
      PipelineResult result = build(device_, source());
      if (result.pipeline != nullptr) pipelines_.emplace(cache_key, result.pipeline);
      return result;
    }
  }

  std::string launch(std::span<const Launch> launches) override {
    at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
    __block std::string error;
    dispatch_sync(stream->queue(), ^{
      @autoreleasepool {
        try {
          id<MTLComputeCommandEncoder> encoder = stream->commandEncoder();
          for (const Launch& one : launches) encode(encoder, one);
        } catch (const std::exception& failure) {
          error = failure.what();
        }
      }
    });
    return error;
  }

 private:
  static constexpr int kNotAsked = -1;

  id<MTLDevice> device_;
  std::atomic<int> gpu_cores_ = kNotAsked;
  std::mutex mutex_;
  std::unordered_map<uint64_t, const Pipeline*> pipelines_;
};

// Makes the device known when this library is loaded, where there is one.
[[maybe_unused]] const bool registered = [] {
  id<MTLDevice> device = MTLCreateSystemDefaultDevice();
  if (device == nil) return false;
  static MetalDevice metal_device(device);
  set_device(&metal_device);
  return true;
}();

}  // namespace

}  // namespace flash_mps
