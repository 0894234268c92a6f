#include "memory.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include "device_state.h"

namespace sim {
namespace {

constexpr size_t kAlignment = 256;  // of contents, as newBufferWithLength: guarantees no less
constexpr size_t kFrontGuard = kAlignment;
constexpr size_t kBackGuard = 64;
constexpr unsigned char kGuardByte = 0xFD;
constexpr unsigned char kPoison = 0xFF;  // NaN in every floating-point type
constexpr size_t kMinClassBytes = 512;
constexpr size_t kMaxPooledBytes = size_t{256} << 20;
constexpr size_t kNumClasses = 256;

// Four classes for each power of two, so that at most a fifth of a block is unused.
size_t class_of(size_t bytes) {
  bytes = std::max(bytes, kMinClassBytes);
  const int log2 = std::bit_width(bytes - 1) - 1;
  const size_t step = size_t{1} << (log2 - 2);
  const size_t quarter = (bytes - 1 - (size_t{1} << log2)) / step;
  return static_cast<size_t>(log2) * 4 + quarter;
}

size_t bytes_of(size_t size_class) {
  const size_t log2 = size_class / 4, quarter = size_class % 4;
  return (size_t{1} << log2) + ((quarter + 1) << (log2 - 2));
}

class Pool {
 public:
  unsigned char* take(size_t size_class) {
    {
      std::lock_guard lock(mutex_);
      auto& blocks = free_[size_class];
      if (!blocks.empty()) {
        auto* block = blocks.back();
        blocks.pop_back();
        pooled_bytes_ -= bytes_of(size_class);
        return block;
      }
    }
    const size_t bytes = (bytes_of(size_class) + kAlignment - 1) & ~(kAlignment - 1);
    return static_cast<unsigned char*>(std::aligned_alloc(kAlignment, bytes));
  }

  void give(unsigned char* block, size_t size_class) {
    std::unique_lock lock(mutex_);
    if (pooled_bytes_ + bytes_of(size_class) > kMaxPooledBytes) {
      lock.unlock();
      return std::free(block);
    }
    pooled_bytes_ += bytes_of(size_class);
    free_[size_class].push_back(block);
  }

 private:
  std::mutex mutex_;
  std::array<std::vector<unsigned char*>, kNumClasses> free_;
  size_t pooled_bytes_ = 0;
};

// Never destroyed: buffers of static objects come back after every other static is gone.
Pool& pool() {
  static auto* instance = new Pool;
  return *instance;
}

bool is_guard_intact(const unsigned char* begin, size_t bytes) {
  return std::all_of(begin, begin + bytes, [](unsigned char byte) { return byte == kGuardByte; });
}

}  // namespace

std::shared_ptr<Storage> Storage::allocate(size_t length) {
  const size_t size_class = class_of(kFrontGuard + length + kBackGuard);
  unsigned char* block = size_class < kNumClasses ? pool().take(size_class) : nullptr;
  if (!block) return nullptr;
  std::shared_ptr<Storage> storage(new Storage);
  storage->contents_ = block + kFrontGuard;
  storage->length_ = length;
  storage->size_class_ = size_class;
  std::memset(storage->contents_ - kBackGuard, kGuardByte, kBackGuard);
  std::memset(storage->contents_ + length, kGuardByte, kBackGuard);
  if (checks_enabled()) std::memset(storage->contents_, kPoison, length);
  return storage;
}

std::shared_ptr<Storage> Storage::adopt(void* contents, size_t length,
                                        std::function<void()> release) {
  std::shared_ptr<Storage> storage(new Storage);
  storage->contents_ = static_cast<unsigned char*>(contents);
  storage->length_ = length;
  storage->release_ = std::move(release);
  return storage;
}

void Storage::retire() {
  retired_.store(true, std::memory_order_release);
  if (!release_ && checks_enabled()) std::memset(contents_, kPoison, length_);
}

Storage::~Storage() {
  if (release_) {
    release_();
    return;
  }
  const char* side = !is_guard_intact(contents_ - kBackGuard, kBackGuard) ? "before its first"
                     : !is_guard_intact(contents_ + length_, kBackGuard)  ? "after its last"
                                                                          : nullptr;
  if (side) {
    report_fault("MTLBuffer '" + label + "' of " + std::to_string(length_) +
                 " bytes: something wrote " + side + " byte");
  }
  pool().give(contents_ - kFrontGuard, size_class_);
}

}  // namespace sim
