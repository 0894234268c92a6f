// Metal for callers that speak no Objective-C: the Python bindings drive the API through it, by the
// same route as any host code.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "executor.h"

namespace sim::script {

// One reference to an Objective-C object.
class Object {
 public:
  Object() = default;
  explicit Object(void* owned) : object_(owned) {}
  Object(const Object& other);
  Object(Object&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Object& operator=(Object other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Object();
  void* get() const { return object_; }

 private:
  void* object_ = nullptr;
};

// The bytes of a function constant and their MSL type: bool, int, uint, float, ...
struct Constant {
  std::string type;
  std::vector<unsigned char> bytes;
};

class Buffer {
 public:
  Buffer(size_t length, const std::string& label);
  unsigned char* contents() const;
  size_t length() const;
  void* object() const { return object_.get(); }

 private:
  Object object_;
};

// The functions below throw std::runtime_error with what an NSError says.

class Pipeline {
 public:
  const std::string& name() const { return name_; }
  uint64_t max_threads() const;
  uint64_t static_threadgroup_bytes() const;
  void* object() const { return object_.get(); }

 private:
  friend class Library;
  std::string name_;
  Object object_;
};

class Library {
 public:
  Library(const std::string& source, bool fast_math,
          const std::vector<std::pair<std::string, std::string>>& macros, int language_version);
  std::vector<std::string> function_names() const;
  Pipeline pipeline(const std::string& name,
                    const std::vector<std::pair<uint32_t, Constant>>& constants,
                    uint64_t max_threads) const;

 private:
  Object object_;
};

class Encoder {
 public:
  void set_pipeline(const Pipeline* pipeline);
  void set_buffer(const Buffer* buffer, uint64_t offset, uint64_t slot);
  void set_buffer_offset(uint64_t offset, uint64_t slot);
  void set_bytes(std::span<const unsigned char> bytes, uint64_t slot);
  void set_threadgroup_memory(uint64_t length, uint64_t slot);
  void dispatch_threadgroups(Extent threadgroups, Extent threads_per_threadgroup);
  void dispatch_threads(Extent threads, Extent threads_per_threadgroup);
  void barrier(const std::vector<const Buffer*>& buffers);  // empty: all memory
  void end();

 private:
  friend class CommandBuffer;
  Object object_;  // null when the command buffer did not give an encoder
};

class CommandBuffer {
 public:
  explicit CommandBuffer(bool retains_references);
  Encoder compute_encoder(bool is_concurrent);
  void copy(const Buffer& source, uint64_t source_offset, const Buffer& destination,
            uint64_t destination_offset, uint64_t length);
  void fill(const Buffer& buffer, uint64_t offset, uint64_t length, uint8_t value);
  void set_label(const std::string& label);
  void commit();
  void wait();
  std::string status();
  std::string error();  // empty when there is none

 private:
  Object object_;
};

std::string device_name();

}  // namespace sim::script
