// metal_atomic. Threads of different threadgroups run on different cores, so these are real atomics;
// float has them through compare-and-swap.
#pragma once

namespace metal {

enum memory_order {
  memory_order_relaxed,
  memory_order_acquire,
  memory_order_release,
  memory_order_acq_rel,
  memory_order_seq_cst
};
enum thread_scope {
  thread_scope_thread,
  thread_scope_simdgroup,
  thread_scope_threadgroup,
  thread_scope_device,
  thread_scope_system
};

template <typename T>
struct atomic {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "atomic<T>: T must have 4 or 8 bytes");
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;
typedef atomic<ulong> atomic_ulong;

template <>
struct atomic<bool> {
  bool value;
};

// The host address of an atomic in any space, after the executor has checked it.
template <typename T, typename P>
SIM_HIDDEN inline T* checked_atomic(P object) {
  T* address = reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(object));
  sim::Thread* me = sim::self();
  me->services->atomic_access(me, address, sizeof(T));
  return address;
}

template <typename T, typename F>
SIM_HIDDEN inline T atomic_update(T* address, F update) {
  T before, after;
  __atomic_load(address, &before, __ATOMIC_RELAXED);
  do {
    after = update(before);
  } while (!__atomic_compare_exchange(address, &before, &after, true, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED));
  return before;
}

#define SIM_ATOMIC_UPDATE(space, name, ...)                                                        \
  template <typename T>                                                                            \
  SIM_HIDDEN inline T atomic_##name##_explicit(volatile space atomic<T>* object,                   \
                                               typename type_identity<T>::type operand,            \
                                               memory_order, thread_scope = thread_scope_device) { \
    return atomic_update(checked_atomic<T>(object),                                                \
                         [operand](T before) -> T { return __VA_ARGS__; });                        \
  }
#define SIM_ATOMICS(space)                                                                         \
  SIM_ATOMIC_UPDATE(space, fetch_add, before + operand)                                            \
  SIM_ATOMIC_UPDATE(space, fetch_sub, before - operand)                                            \
  SIM_ATOMIC_UPDATE(space, fetch_max, before > operand ? before : operand)                         \
  SIM_ATOMIC_UPDATE(space, fetch_min, before < operand ? before : operand)                         \
  SIM_ATOMIC_UPDATE(space, fetch_and, before& operand)                                             \
  SIM_ATOMIC_UPDATE(space, fetch_or, before | operand)                                             \
  SIM_ATOMIC_UPDATE(space, fetch_xor, before ^ operand)                                            \
  SIM_ATOMIC_UPDATE(space, exchange, operand)                                                      \
  template <typename T>                                                                            \
  SIM_HIDDEN inline T atomic_load_explicit(const volatile space atomic<T>* object, memory_order,   \
                                           thread_scope = thread_scope_device) {                   \
    T value;                                                                                       \
    __atomic_load(checked_atomic<T>(object), &value, __ATOMIC_RELAXED);                            \
    return value;                                                                                  \
  }                                                                                                \
  template <typename T>                                                                            \
  SIM_HIDDEN inline void atomic_store_explicit(volatile space atomic<T>* object,                   \
                                               typename type_identity<T>::type value,              \
                                               memory_order, thread_scope = thread_scope_device) { \
    T copy = value;                                                                                \
    __atomic_store(checked_atomic<T>(object), &copy, __ATOMIC_RELAXED);                            \
  }                                                                                                \
  template <typename T>                                                                            \
  SIM_HIDDEN inline bool atomic_compare_exchange_weak_explicit(                                    \
      volatile space atomic<T>* object, thread T* expected,                                        \
      typename type_identity<T>::type desired, memory_order, memory_order,                         \
      thread_scope = thread_scope_device) {                                                        \
    T copy = desired;                                                                              \
    return __atomic_compare_exchange(checked_atomic<T>(object), expected, &copy, false,            \
                                     __ATOMIC_RELAXED, __ATOMIC_RELAXED);                          \
  }
SIM_ATOMICS(device)
SIM_ATOMICS(threadgroup)
#undef SIM_ATOMICS
#undef SIM_ATOMIC_UPDATE

}  // namespace metal
