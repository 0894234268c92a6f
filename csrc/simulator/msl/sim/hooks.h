// The compiler's run-time hooks, defined inside every kernel: no symbol is shared between libraries.
#pragma once

// float to bfloat, round to nearest even. clang calls this where the CPU has no such instruction.
extern "C" __attribute__((visibility("hidden"), used)) SIM_HIDDEN bfloat __truncsfbf2(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  const uint32_t rounded = is_nan ? bits | 0x400000u : bits + 0x7FFFu + (bits >> 16 & 1u);
  return __builtin_bit_cast(bfloat, static_cast<uint16_t>(rounded >> 16));
}
extern "C" __attribute__((visibility("hidden"), used)) SIM_HIDDEN bfloat
__truncdfbf2(double value) {
  return __truncsfbf2(static_cast<float>(value));
}

#ifdef SIM_INSTRUMENTED

// The library's own image: tables in constant memory are no buffer of the host.
extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start[], _end[];

namespace sim {

SIM_HIDDEN inline __attribute__((always_inline)) void access(uintptr_t address, uint32_t bytes,
                                                             bool is_write) {
  Thread* me = current_thread();
  if (address - me->stacks_begin < me->stacks_end - me->stacks_begin) return;
  if (address >= reinterpret_cast<uintptr_t>(__ehdr_start) &&
      address < reinterpret_cast<uintptr_t>(_end)) {
    return;
  }
  me->services->access(me, reinterpret_cast<const void*>(address), bytes, is_write);
}

}  // namespace sim

#define SIM_HOOK extern "C" __attribute__((visibility("hidden"), used)) SIM_HIDDEN void
#define SIM_ACCESS_HOOKS(n)                               \
  SIM_HOOK __asan_load##n##_noabort(uintptr_t address) {  \
    sim::access(address, n, false);                       \
  }                                                       \
  SIM_HOOK __asan_store##n##_noabort(uintptr_t address) { \
    sim::access(address, n, true);                        \
  }
SIM_ACCESS_HOOKS(1)
SIM_ACCESS_HOOKS(2)
SIM_ACCESS_HOOKS(4)
SIM_ACCESS_HOOKS(8)
SIM_ACCESS_HOOKS(16)
SIM_HOOK __asan_loadN_noabort(uintptr_t address, size_t bytes) {
  sim::access(address, uint32_t(bytes), false);
}
SIM_HOOK __asan_storeN_noabort(uintptr_t address, size_t bytes) {
  sim::access(address, uint32_t(bytes), true);
}
SIM_HOOK __asan_handle_no_return() {}

extern "C" __attribute__((visibility("hidden"), used)) SIM_HIDDEN void* __asan_memcpy(
    void* to, const void* from, size_t bytes) {
  sim::access(reinterpret_cast<uintptr_t>(from), uint32_t(bytes), false);
  sim::access(reinterpret_cast<uintptr_t>(to), uint32_t(bytes), true);
  return __builtin_memcpy(to, from, bytes);
}
extern "C" __attribute__((visibility("hidden"), used)) SIM_HIDDEN void* __asan_memmove(
    void* to, const void* from, size_t bytes) {
  sim::access(reinterpret_cast<uintptr_t>(from), uint32_t(bytes), false);
  sim::access(reinterpret_cast<uintptr_t>(to), uint32_t(bytes), true);
  return __builtin_memmove(to, from, bytes);
}
extern "C" __attribute__((visibility("hidden"), used)) SIM_HIDDEN void* __asan_memset(
    void* to, int value, size_t bytes) {
  sim::access(reinterpret_cast<uintptr_t>(to), uint32_t(bytes), true);
  return __builtin_memset(to, value, bytes);
}

#undef SIM_ACCESS_HOOKS
#undef SIM_HOOK
#endif
