// Encoders without Objective-C: they check each call as Metal's validation layer would, and record.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "command_list.h"

namespace sim {

// What compute and blit encoders share: one pass of one command list, open until end().
class Encoder {
 public:
  Encoder(std::shared_ptr<CommandList> list, const char* kind, bool is_concurrent);
  ~Encoder();
  // False when the command buffer did not take this encoder; the fault is reported.
  bool is_open() const { return pass_ != nullptr; }
  bool is_concurrent() const { return is_concurrent_; }
  void end();

 protected:
  // False, and a fault that names `call`, after endEncoding.
  bool check_open(const char* call);
  void fail(const char* call, const std::string& message);
  void record(Command command) { pass_->commands.push_back(std::move(command)); }
  bool retains_references() const { return list_->retains_references; }
  void retain(void* object) { list_->retain(object); }

 private:
  std::shared_ptr<CommandList> list_;
  const char* kind_;
  bool is_concurrent_;
  Pass* pass_;
};

// An MTLBuffer as the encoder sees it: its memory, and the object to keep alive.
struct BufferRef {
  std::shared_ptr<Storage> storage;
  void* object = nullptr;
};

class ComputeEncoder : public Encoder {
 public:
  ComputeEncoder(std::shared_ptr<CommandList> list, bool is_concurrent)
      : Encoder(std::move(list), "computeCommandEncoder", is_concurrent) {}

  void set_pipeline(std::shared_ptr<Pipeline> pipeline);
  void set_buffer(const BufferRef& buffer, uint64_t offset, uint64_t slot);
  void set_buffer_offset(uint64_t offset, uint64_t slot);
  void set_bytes(const void* bytes, uint64_t length, uint64_t slot);
  void set_threadgroup_memory(uint64_t length, uint64_t slot);
  void dispatch_threadgroups(Extent threadgroups, Extent threads_per_threadgroup);
  void dispatch_threads(Extent threads, Extent threads_per_threadgroup);
  void barrier();
  void barrier(std::span<const BufferRef> buffers);

 private:
  bool check_slot(const char* call, uint64_t slot);
  void dispatch(const char* call, Extent threads, Extent threads_per_threadgroup);
  bool check_sizes(const char* call, Extent threads, Extent threads_per_threadgroup);
  bool check_arguments(const char* call);
  // What is wrong with one argument of the pipeline; empty when nothing is.
  std::string check_argument(const BufferArgument& argument) const;

  std::shared_ptr<Pipeline> pipeline_;
  std::array<Location, kMaxBuffers> buffers_;
  std::array<uint32_t, kMaxBuffers> threadgroup_bytes_{};
};

class BlitEncoder : public Encoder {
 public:
  explicit BlitEncoder(std::shared_ptr<CommandList> list)
      : Encoder(std::move(list), "blitCommandEncoder", false) {}

  void copy(const BufferRef& source, uint64_t source_offset, const BufferRef& destination,
            uint64_t destination_offset, uint64_t length);
  void fill(const BufferRef& buffer, uint64_t offset, uint64_t length, uint8_t value);

 private:
  bool check_range(const char* call, const BufferRef& buffer, uint64_t offset, uint64_t length);
  void keep(const BufferRef& buffer);
};

}  // namespace sim
