#include "buffer_map.h"

#include <algorithm>
#include <cstdio>

namespace sim {
namespace {

constexpr uintptr_t kNearBytes = uintptr_t(1) << 32;   // further off, an offset says nothing
constexpr uintptr_t kNullBytes = uintptr_t(1) << 30;   // nothing is ever mapped below

}  // namespace

BufferMap::BufferMap(const Dispatch& dispatch) : info_(dispatch.kernel->info()) {
  std::vector<BufferRegion> ranges;
  for (uint32_t slot = 0; slot < kMaxBuffers; ++slot) {
    const BoundBuffer& buffer = dispatch.buffers[slot];
    if (!buffer.contents) continue;
    const uintptr_t contents = reinterpret_cast<uintptr_t>(buffer.contents);
    const uint64_t offset = std::min(buffer.offset, buffer.length);
    const Binding binding = {slot, contents + offset, contents + buffer.length};
    bindings_.push_back(binding);
    const auto is_any = [&](bool BufferArgument::* property) {
      return std::any_of(info_.buffers.begin(), info_.buffers.end(), [&](const BufferArgument& a) {
        return !a.is_threadgroup && a.slot == slot && a.*property;
      });
    };
    if (binding.begin < binding.end) {
      ranges.push_back({.begin = binding.begin,
                        .end = binding.end,
                        .is_writable = is_any(&BufferArgument::is_writable),
                        .is_constant = is_any(&BufferArgument::is_constant)});
    }
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const auto& x, const auto& y) { return x.begin < y.begin; });
  for (const BufferRegion& range : ranges) {
    if (regions_.empty() || range.begin >= regions_.back().end) {
      regions_.push_back(range);
    } else {
      regions_.back().end = std::max(regions_.back().end, range.end);
      regions_.back().is_writable |= range.is_writable;
      regions_.back().is_constant &= range.is_constant;
    }
  }
  for (BufferRegion& region : regions_) {
    region.first_line = num_lines_;
    region.first_cell = num_cells_;
    num_lines_ += (region.end - 1) / kLineBytes - region.begin / kLineBytes + 1;
    if (region.is_writable) num_cells_ += region.end - region.begin;
  }
}

const BufferRegion* BufferMap::find(uintptr_t address, uint32_t bytes) const {
  for (const BufferRegion& region : regions_) {
    if (region.contains(address, bytes)) return &region;
  }
  return nullptr;
}

std::string BufferMap::name_of(uint32_t slot) const {
  std::string name = "slot " + std::to_string(slot);
  for (const BufferArgument& argument : info_.buffers) {
    if (!argument.is_threadgroup && argument.slot == slot) name += " '" + argument.name + "'";
  }
  return name;
}

std::string BufferMap::describe(uintptr_t address) const {
  const Binding* nearest = nullptr;
  uintptr_t least = UINTPTR_MAX;
  for (const Binding& binding : bindings_) {
    const uintptr_t distance = address < binding.begin ? binding.begin - address
                               : address < binding.end ? 0
                                                       : address - binding.end + 1;
    if (distance < least) {
      nearest = &binding;
      least = distance;
    }
  }
  if (!nearest || least > kNearBytes) {
    char text[32];
    std::snprintf(text, sizeof text, "address 0x%llx", static_cast<unsigned long long>(address));
    return text;
  }
  return "byte offset " + std::to_string(intptr_t(address - nearest->begin)) + " of " +
         name_of(nearest->slot) + " (" + std::to_string(nearest->end - nearest->begin) + " bytes)";
}

std::string BufferMap::describe_unbound(uintptr_t address) const {
  if (address >= kNullBytes && address < -kNullBytes) return "";
  std::string names;
  uint32_t count = 0;
  for (const BufferArgument& argument : info_.buffers) {
    const bool is_bound = std::any_of(bindings_.begin(), bindings_.end(),
                                      [&](const Binding& b) { return b.slot == argument.slot; });
    if (argument.is_threadgroup || is_bound) continue;
    names += (count++ ? ", " : "") + name_of(argument.slot);
  }
  if (count == 0) return "";
  return names + (count == 1 ? " is not bound" : " are not bound");
}

}  // namespace sim
