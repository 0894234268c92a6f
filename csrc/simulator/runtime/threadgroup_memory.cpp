#include "threadgroup_memory.h"

#include <algorithm>
#include <cstring>

namespace sim {
namespace {

// Arrays lie apart, so that running off the end of one does not land in the next.
constexpr uint32_t kGapBytes = 256;

using FourStamps = Stamp __attribute__((vector_size(16)));
using TwoWords = uint64_t __attribute__((vector_size(16)));

template <uint32_t kCount>
inline __attribute__((always_inline)) bool are_equal(const Stamp* stamps) {
  if constexpr (kCount < 4) {
    return stamps[0] == stamps[kCount - 1];
  } else {
    FourStamps differences{};
    for (uint32_t i = 0; i < kCount; i += 4) {
      FourStamps four;
      std::memcpy(&four, stamps + i, sizeof four);
      differences |= four ^ stamps[0];
    }
    const TwoWords words = TwoWords(differences);
    return (words[0] | words[1]) == 0;
  }
}

}  // namespace

ThreadgroupMemory::ThreadgroupMemory()
    : arena_(kArenaBytes),
      shadow_(2 * kArenaBytes * sizeof(Stamp)),
      writes_(static_cast<Stamp*>(shadow_.data())),
      reads_(writes_ + kArenaBytes) {}

void ThreadgroupMemory::begin_dispatch(const KernelInfo& info, uint32_t reserved) {
  info_ = &info;
  arrays_.clear();
  arena_used_ = kGapBytes;
  bytes_used_ = reserved;
}

void ThreadgroupMemory::begin_threadgroup() {
  ++threadgroup_;
  array_begin_ = array_end_ = 0;
  // The stamps of earlier threadgroups are older than this one's first: no need to clear them.
  if (order_.begin_threadgroup()) {
    shadow_ = ZeroPages(shadow_.bytes());
    writes_ = static_cast<Stamp*>(shadow_.data());
    reads_ = writes_ + kArenaBytes;
  }
}

void* ThreadgroupMemory::place(uint32_t id, uint32_t bytes, uint32_t alignment, const char* name) {
  if (id >= arrays_.size()) arrays_.resize(id + 1);
  ThreadgroupArray& array = arrays_[id];
  if (array.bytes && array.threadgroup == threadgroup_) return at(array.begin);
  if (array.bytes == 0) {
    const auto& arguments = info_->buffers;
    const bool is_slot = std::any_of(arguments.begin(), arguments.end(), [&](const auto& argument) {
      return argument.is_threadgroup && argument.name == name;
    });
    if (!is_slot) bytes_used_ += bytes;
    const uint32_t begin = (arena_used_ + alignment - 1) & ~(alignment - 1);
    if (bytes_used_ > kMaxThreadgroupBytes || begin + bytes + kGapBytes > kArenaBytes) {
      return nullptr;
    }
    array = {name, begin, bytes, 0};
    arena_used_ = begin + bytes + kGapBytes;
  }
  array.threadgroup = threadgroup_;
  std::memset(at(array.begin), 0xFF, array.bytes);   // what a kernel must not rely on
  return at(array.begin);
}

bool ThreadgroupMemory::find_array(uint32_t offset, uint32_t bytes) {
  for (const ThreadgroupArray& array : arrays_) {
    if (offset >= array.begin && offset + bytes <= array.begin + array.bytes) {
      array_begin_ = array.begin;
      array_end_ = array.begin + array.bytes;
      return true;
    }
  }
  return false;
}

inline __attribute__((always_inline)) ThreadgroupMemory::Finding ThreadgroupMemory::access_cell(
    Stamp& write, Stamp& read, AccessKind kind, uint32_t thread) {
  if (kind == AccessKind::Read && !order_.is_of_this_threadgroup(write)) {
    return Finding::NeverWritten;
  }
  const bool are_atomics = kind == AccessKind::Atomic && who(write) == kAtomics;
  if (!are_atomics && !order_.is_before(write, thread)) {
    detail_.other = write;
    return Finding::RaceWithWrite;
  }
  if (kind == AccessKind::Read) {
    read = order_.merge_read(read, thread);
    return Finding::Clean;
  }
  if (!order_.is_before(read, thread)) {
    detail_.other = read;
    return Finding::RaceWithRead;
  }
  write = kind == AccessKind::Write ? order_.stamp(thread) : order_.atomic_stamp(thread);
  return Finding::Clean;
}

// Neighbouring bytes mostly share their past: then one verdict holds for all of them.
template <uint32_t kBytes>
inline ThreadgroupMemory::Finding ThreadgroupMemory::access_cells(uint32_t offset, AccessKind kind,
                                                                  uint32_t thread) {
  Stamp* const write = writes_ + offset;
  Stamp* const read = reads_ + offset;
  if constexpr (kBytes > 1) {
    if (!are_equal<kBytes>(write) || !are_equal<kBytes>(read)) {
      const Finding finding = access_cells<kBytes / 2>(offset, kind, thread);
      if (finding != Finding::Clean) [[unlikely]]
        return finding;
      return access_cells<kBytes / 2>(offset + kBytes / 2, kind, thread);
    }
  }
  const Stamp old_write = write[0], old_read = read[0];
  const Finding finding = access_cell(write[0], read[0], kind, thread);
  if (finding != Finding::Clean) [[unlikely]] {
    detail_.offset = offset;
    return finding;
  }
  if (write[0] != old_write) std::fill_n(write, kBytes, write[0]);
  if (read[0] != old_read) std::fill_n(read, kBytes, read[0]);
  return Finding::Clean;
}

ThreadgroupMemory::Finding ThreadgroupMemory::access(uintptr_t address, uint32_t bytes,
                                                     AccessKind kind, uint32_t thread) {
  uint32_t offset = address - arena();
  if ((offset < array_begin_ || offset + bytes > array_end_) && !find_array(offset, bytes)) {
    detail_.offset = offset;
    return Finding::OutsideArray;
  }
  switch (bytes) {
    case 2: return access_cells<2>(offset, kind, thread);
    case 4: return access_cells<4>(offset, kind, thread);
    case 8: return access_cells<8>(offset, kind, thread);
    case 16: return access_cells<16>(offset, kind, thread);
    default: break;
  }
  for (uint32_t i = 0; i < bytes; ++i) {
    const Finding finding = access_cells<1>(offset + i, kind, thread);
    if (finding != Finding::Clean) [[unlikely]]
      return finding;
  }
  return Finding::Clean;
}

std::string ThreadgroupMemory::describe(uint32_t offset) const {
  const ThreadgroupArray* nearest = nullptr;
  for (const ThreadgroupArray& array : arrays_) {
    const bool is_near = array.bytes && offset + kGapBytes / 2 >= array.begin;
    if (is_near && (!nearest || array.begin > nearest->begin)) nearest = &array;
  }
  if (!nearest) return "threadgroup memory in no array";
  return "byte offset " + std::to_string(int32_t(offset - nearest->begin)) +
         " of threadgroup array '" + nearest->name + "' (" + std::to_string(nearest->bytes) +
         " bytes)";
}

}  // namespace sim
