#include "encoders.h"

#include <algorithm>
#include <cstring>

#include "device_state.h"

namespace sim {
namespace {

constexpr uint64_t kMaxInlineBytes = 4096;
constexpr uint64_t kThreadgroupGranule = 16;

std::string text(uint64_t value) {
  return std::to_string(value);
}

std::string text(Extent e) {
  return "(" + text(e.x) + ", " + text(e.y) + ", " + text(e.z) + ")";
}

uint64_t volume(Extent e) {
  return uint64_t{e.x} * e.y * e.z;
}

}  // namespace

Encoder::Encoder(std::shared_ptr<CommandList> list, const char* kind, bool is_concurrent)
    : list_(std::move(list)),
      kind_(kind),
      is_concurrent_(is_concurrent),
      pass_(list_->begin_pass(kind, is_concurrent)) {}

Encoder::~Encoder() {
  if (pass_) fail("dealloc", "expected endEncoding before the encoder is released");
}

void Encoder::end() {
  if (!check_open("endEncoding")) return;
  pass_ = nullptr;
  list_->end_pass();
}

bool Encoder::check_open(const char* call) {
  if (pass_) return true;
  fail(call, "expected an open encoder, found one after endEncoding");
  return false;
}

void Encoder::fail(const char* call, const std::string& message) {
  list_->fail(std::string(kind_) + " " + call + ": " + message);
}

void ComputeEncoder::set_pipeline(std::shared_ptr<Pipeline> pipeline) {
  if (check_open("setComputePipelineState")) pipeline_ = std::move(pipeline);
}

bool ComputeEncoder::check_slot(const char* call, uint64_t slot) {
  if (!check_open(call)) return false;
  if (slot < kMaxBuffers) return true;
  fail(call, "expected a slot from 0 to " + text(kMaxBuffers - 1) + ", found " + text(slot));
  return false;
}

void ComputeEncoder::set_buffer(const BufferRef& buffer, uint64_t offset, uint64_t slot) {
  if (!check_slot("setBuffer", slot)) return;
  buffers_[slot] = {buffer.storage, 0};
  if (!buffer.storage) return;
  if (retains_references()) retain(buffer.object);
  set_buffer_offset(offset, slot);
}

void ComputeEncoder::set_buffer_offset(uint64_t offset, uint64_t slot) {
  if (!check_slot("setBufferOffset", slot)) return;
  auto& location = buffers_[slot];
  if (!location.storage) {
    return fail("setBufferOffset", "expected a buffer at slot " + text(slot) + ", found none");
  }
  if (offset > location.storage->length()) {
    return fail("setBuffer", "slot " + text(slot) + ": expected an offset inside the buffer '" +
                                 location.storage->label + "' of " +
                                 text(location.storage->length()) + " bytes, found " +
                                 text(offset));
  }
  location.offset = offset;
}

void ComputeEncoder::set_bytes(const void* bytes, uint64_t length, uint64_t slot) {
  if (!check_slot("setBytes", slot)) return;
  if (length == 0 || length > kMaxInlineBytes) {
    return fail("setBytes", "slot " + text(slot) + ": expected 1 to " + text(kMaxInlineBytes) +
                                " bytes, found " + text(length));
  }
  auto storage = Storage::allocate(length);
  if (!storage) return fail("setBytes", "out of memory");
  storage->label = "setBytes";
  std::memcpy(storage->contents(), bytes, length);
  buffers_[slot] = {std::move(storage), 0};
}

void ComputeEncoder::set_threadgroup_memory(uint64_t length, uint64_t slot) {
  if (!check_slot("setThreadgroupMemoryLength", slot)) return;
  const std::string where = "slot " + text(slot) + ": ";
  if (length % kThreadgroupGranule != 0) {
    return fail("setThreadgroupMemoryLength",
                where + "expected a multiple of 16 bytes, found " + text(length));
  }
  if (length > kMaxThreadgroupBytes) {
    return fail(
        "setThreadgroupMemoryLength",
        where + "expected at most " + text(kMaxThreadgroupBytes) + " bytes, found " + text(length));
  }
  threadgroup_bytes_[slot] = static_cast<uint32_t>(length);
}

void ComputeEncoder::dispatch_threadgroups(Extent threadgroups, Extent group) {
  dispatch("dispatchThreadgroups",
           {threadgroups.x * group.x, threadgroups.y * group.y, threadgroups.z * group.z}, group);
}

void ComputeEncoder::dispatch_threads(Extent threads, Extent threads_per_threadgroup) {
  dispatch("dispatchThreads", threads, threads_per_threadgroup);
}

bool ComputeEncoder::check_sizes(const char* call, Extent threads, Extent group) {
  const std::string kernel = "kernel '" + pipeline_->info().name + "': ";
  if (volume(threads) == 0 || volume(group) == 0) {
    fail(call, kernel + "expected a grid and a threadgroup that are not empty, found " +
                   text(threads) + " threads in threadgroups of " + text(group));
    return false;
  }
  if (volume(group) > pipeline_->max_threads) {
    fail(call, kernel + "expected at most " + text(pipeline_->max_threads) +
                   " threads per threadgroup, found " + text(volume(group)) + " " + text(group));
    return false;
  }
  return true;
}

bool ComputeEncoder::check_arguments(const char* call) {
  const auto& info = pipeline_->info();
  uint64_t threadgroup_bytes = info.static_threadgroup_bytes;
  for (const auto& argument : info.buffers) {
    const std::string problem = check_argument(argument);
    if (!problem.empty()) {
      fail(call, "kernel '" + info.name + "', argument '" + argument.name + "' at " +
                     (argument.is_threadgroup ? "threadgroup" : "buffer") + " slot " +
                     text(argument.slot) + ": " + problem);
      return false;
    }
    if (argument.is_threadgroup) threadgroup_bytes += threadgroup_bytes_[argument.slot];
  }
  if (threadgroup_bytes <= kMaxThreadgroupBytes) return true;
  fail(call, "kernel '" + info.name + "': expected at most " + text(kMaxThreadgroupBytes) +
                 " bytes of threadgroup memory, found " + text(threadgroup_bytes));
  return false;
}

std::string ComputeEncoder::check_argument(const BufferArgument& argument) const {
  if (argument.is_threadgroup) {
    return threadgroup_bytes_[argument.slot]
               ? ""
               : "expected a length from setThreadgroupMemoryLength, found none";
  }
  const auto& location = buffers_[argument.slot];
  if (!location.storage) return "expected a buffer or bytes, found an unbound slot";
  if (location.offset % std::max(argument.alignment, 1u) != 0) {
    return "expected an offset that is a multiple of " + text(argument.alignment) +
           " bytes, found " + text(location.offset);
  }
  return "";
}

// Records what the kernel uses and no more: arguments of earlier kernels stay in the table.
void ComputeEncoder::dispatch(const char* call, Extent threads, Extent group) {
  if (!check_open(call)) return;
  if (!pipeline_) {
    return fail(call, "expected a pipeline from setComputePipelineState, found none");
  }
  if (!check_sizes(call, threads, group) || !check_arguments(call)) return;
  DispatchCommand command{.pipeline = pipeline_,
                          .buffers = {},
                          .threads_per_grid = threads,
                          .threads_per_threadgroup = group};
  const auto& arguments = pipeline_->info().buffers;
  command.buffers.reserve(arguments.size());
  for (const auto& argument : arguments) {
    const uint32_t slot = argument.slot;
    if (argument.is_threadgroup)
      command.threadgroup_bytes[slot] = threadgroup_bytes_[slot];
    else
      command.buffers.emplace_back(slot, buffers_[slot]);
  }
  record(std::move(command));
}

void ComputeEncoder::barrier() {
  if (check_open("memoryBarrierWithScope")) record(BarrierCommand{});
}

void ComputeEncoder::barrier(std::span<const BufferRef> buffers) {
  if (!check_open("memoryBarrierWithResources") || buffers.empty()) return;
  BarrierCommand command;
  for (const auto& buffer : buffers) command.storages.push_back(buffer.storage);
  record(std::move(command));
}

bool BlitEncoder::check_range(const char* call, const BufferRef& buffer, uint64_t offset,
                              uint64_t length) {
  if (!check_open(call)) return false;
  if (!buffer.storage) {
    fail(call, "expected a buffer, found nil");
    return false;
  }
  const uint64_t available = buffer.storage->length();
  if (offset <= available && length <= available - offset) return true;
  fail(call, "expected a range inside the buffer '" + buffer.storage->label + "' of " +
                 text(available) + " bytes, found offset " + text(offset) + ", length " +
                 text(length));
  return false;
}

void BlitEncoder::keep(const BufferRef& buffer) {
  if (retains_references()) retain(buffer.object);
}

void BlitEncoder::copy(const BufferRef& source, uint64_t source_offset,
                       const BufferRef& destination, uint64_t destination_offset, uint64_t length) {
  if (!check_range("copyFromBuffer (source)", source, source_offset, length) ||
      !check_range("copyFromBuffer (destination)", destination, destination_offset, length)) {
    return;
  }
  keep(source);
  keep(destination);
  record(CopyCommand{
      {source.storage, source_offset}, {destination.storage, destination_offset}, length});
}

void BlitEncoder::fill(const BufferRef& buffer, uint64_t offset, uint64_t length, uint8_t value) {
  if (!check_range("fillBuffer", buffer, offset, length)) return;
  keep(buffer);
  record(FillCommand{{buffer.storage, offset}, length, value});
}

}  // namespace sim
