// Memory behind MTLBuffer: pooled by size class, poisoned, with guarded edges.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>

namespace sim {

class Storage {
 public:
  // Returns null when memory has run out. The contents are all 0xFF in checked mode.
  static std::shared_ptr<Storage> allocate(size_t length);
  // Memory of somebody else; `release` runs when nothing uses it any more.
  static std::shared_ptr<Storage> adopt(void* contents, size_t length,
                                        std::function<void()> release);
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;
  ~Storage();

  unsigned char* contents() const { return contents_; }
  size_t length() const { return length_; }

  // The MTLBuffer is gone. Recorded work that still refers to it finds poison, not data.
  void retire();
  bool is_retired() const { return retired_.load(std::memory_order_acquire); }

  std::string label;

 private:
  Storage() = default;

  unsigned char* contents_ = nullptr;
  size_t length_ = 0;
  size_t size_class_ = 0;             // of the pool's block; unused when adopted
  std::function<void()> release_;     // set when adopted
  std::atomic<bool> retired_{false};
};

}  // namespace sim
