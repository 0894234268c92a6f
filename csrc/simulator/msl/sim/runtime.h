// The library's side of kernel_abi.h: barriers and what the other headers need of the executor.
#pragma once

namespace sim {

METAL_FUNC Thread* self() {
  return current_thread();
}

SIM_HIDDEN inline void count_exponentials(uint32_t count) {
  self()->counters.exponentials += count;
}

SIM_HIDDEN inline void matrix_flush() {
  Thread* me = self();
  me->services->matrix_flush(me);
}

}  // namespace sim

// As a default argument: where the call stands that leaves it out.
#define SIM_HERE sim::site_of(__builtin_LINE(), __builtin_COLUMN())

namespace metal {

// Scoped enumerations in MSL, but used as bits.
struct mem_flags {
  enum value : uint32_t {
    mem_none = sim::kMemNone,
    mem_device = sim::kMemDevice,
    mem_threadgroup = sim::kMemThreadgroup,
    mem_texture = sim::kMemTexture,
    mem_device_and_threadgroup = sim::kMemDevice | sim::kMemThreadgroup,
  };
  value bits;
  constexpr mem_flags(value v) : bits(v) {}
};
constexpr mem_flags::value operator|(mem_flags::value a, mem_flags::value b) {
  return static_cast<mem_flags::value>(static_cast<uint32_t>(a) | static_cast<uint32_t>(b));
}

SIM_HIDDEN inline void threadgroup_barrier(mem_flags flags, sim::Site site = SIM_HERE) {
  sim::Thread* me = sim::self();
  me->services->threadgroup_barrier(me, flags.bits, site);
}

SIM_HIDDEN inline void simdgroup_barrier(mem_flags flags, sim::Site site = SIM_HERE) {
  sim::Thread* me = sim::self();
  me->services->simdgroup_barrier(me, flags.bits, site);
}

}  // namespace metal
