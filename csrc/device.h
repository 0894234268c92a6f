// The seam between the ops and Apple's API: pipelines and launches, without a Metal, ATen or attention
// type. Implemented by device_metal.mm.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace flash_mps {

struct Size3 {
  uint32_t x, y, z;
};

// A buffer at a slot. `buffer` is the id<MTLBuffer> that a tensor's storage holds.
struct Binding {
  const void* buffer;
  uint64_t byte_offset;
  uint32_t slot;
};

// Everything that a new pipeline is made from.
struct KernelSource {
  std::string name;  // host name, label in the profiler
  std::string msl;  // complete translation unit
  std::vector<std::pair<uint32_t, int32_t>> int_constants;  // function constants by id
  std::vector<std::pair<uint32_t, bool>> bool_constants;
};

class Pipeline;  // opaque; lives as long as the process

struct PipelineResult {
  const Pipeline* pipeline;  // null on failure
  std::string error;  // kernel name and the reason, when null
};

struct Launch {
  const Pipeline* pipeline;
  std::span<const Binding> bindings;
  const void* params;  // copied into the encoder at params_slot
  size_t params_bytes;
  uint32_t params_slot;
  Size3 grid;  // threadgroups
  uint32_t threads;  // per threadgroup
  // More numbers for the kernel, copied likewise at a slot of their own; none when empty.
  std::span<const int64_t> numbers = {};
  uint32_t numbers_slot = 0;
  bool reads_earlier_launches = false;  // of the same encoder: ordered by a barrier
};

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;
  // N of the newest MTLGPUFamilyAppleN that the GPU supports; 0 for none.
  virtual int gpu_family() const = 0;
  // GPU cores; 0 where the system does not say. Asked once, until `refresh`: the answer takes a walk
  // through the registry of devices.
  virtual int gpu_cores() = 0;
  // Forgets what was asked once.
  virtual void refresh() = 0;
  // The pipeline of `cache_key`, built from `source()` the first time. Thread-safe.
  virtual PipelineResult pipeline(uint64_t cache_key,
                                  const std::function<KernelSource()>& source) = 0;
  // Encodes on PyTorch's current stream, on its queue; never commits or waits. Returns the error, or
  // an empty string.
  virtual std::string launch(std::span<const Launch> launches) = 0;
};

// The device of this process; null where no Metal device is present.
Device* device();
// Called once by the library that holds the implementation, when it is loaded.
void set_device(Device* device);

}  // namespace flash_mps
