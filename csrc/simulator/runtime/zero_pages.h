// Address space that reads as zero and costs memory only where it is written.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>
#include <utility>

namespace sim {

class ZeroPages {
 public:
  ZeroPages() = default;
  explicit ZeroPages(size_t bytes) : bytes_(bytes) {
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data_ == MAP_FAILED) throw std::bad_alloc();
  }
  ZeroPages(ZeroPages&& other) noexcept { swap(other); }
  ZeroPages& operator=(ZeroPages&& other) noexcept {
    swap(other);
    return *this;
  }
  ~ZeroPages() {
    if (bytes_) munmap(data_, bytes_);
  }

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  bool contains(const void* address) const {
    return size_t(static_cast<const char*>(address) - static_cast<const char*>(data_)) < bytes_;
  }

 private:
  void swap(ZeroPages& other) {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }

  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace sim
