// From the executor's one entry point to a kernel's own parameter list. The rewriter states a kernel's
// attributes in a Traits class; types come from the kernel's function type.
#pragma once

namespace sim {

// Parameters of a kernel, as their attributes say.
enum ParameterKind : uint32_t {
  kBuffer,  // [[buffer(n)]], or memory without an attribute
  kThreadgroupBuffer,  // [[threadgroup(n)]]
  kPosition,  // one of MSL's thread positions
};

constexpr uint32_t kNextFreeSlot = ~0u;

struct ParameterAttributes {
  ParameterKind kind;
  uint32_t slot;  // of a buffer
  bool exists;
  const char* name;
};

template <typename F>
struct FunctionTypes;
template <typename... P>
struct FunctionTypes<void (*)(P...)> {
  static constexpr uint32_t count = sizeof...(P);
  template <uint32_t I>
  using parameter = __type_pack_element<I, P...>;
};

// What a pointer or reference parameter refers to.
template <typename P>
struct MemoryOf {
  static constexpr bool is_memory = false, is_writable = false, is_threadgroup = false,
                        is_constant = false;
  static constexpr uint32_t alignment = 1;
};
template <typename T, bool Writable, bool Threadgroup, bool Constant, uint32_t Alignment>
struct Memory {
  using pointer = T*;
  static constexpr bool is_memory = true, is_writable = Writable, is_threadgroup = Threadgroup,
                        is_constant = Constant;
  static constexpr uint32_t alignment = Alignment;
};
template <typename T>
constexpr uint32_t alignment_of() {
  if constexpr (__is_void(T))
    return 1;
  else
    return alignof(T);
}
#define SIM_MEMORY(space, writable, is_threadgroup, is_constant, alignment)                       \
  template <typename T>                                                                           \
  struct MemoryOf<space T*> : Memory<space T, writable, is_threadgroup, is_constant, alignment> { \
  };                                                                                              \
  template <typename T>                                                                           \
  struct MemoryOf<space T&> : Memory<space T, writable, is_threadgroup, is_constant, alignment> { \
  };
SIM_MEMORY(device, true, false, false, alignment_of<T>())
SIM_MEMORY(const device, false, false, false, alignment_of<T>())
SIM_MEMORY(constant, false, false, true, 4)
SIM_MEMORY(threadgroup, true, true, false, 16)
SIM_MEMORY(const threadgroup, false, true, false, 16)
#undef SIM_MEMORY

template <typename Traits>
constexpr uint32_t slot_of(uint32_t i) {
  if (Traits::parameters[i].slot != kNextFreeSlot) return Traits::parameters[i].slot;
  // Buffers without an index take the next slot after the one before them, as in Metal.
  uint32_t slot = 0;
  for (uint32_t j = 0; j < i; ++j) {
    if (Traits::parameters[j].kind == Traits::parameters[i].kind) slot = slot_of<Traits>(j) + 1;
  }
  return slot;
}

template <typename Traits>
constexpr bool slots_are_distinct() {
  for (uint32_t i = 0; i < Traits::count; ++i) {
    for (uint32_t j = 0; j < i; ++j) {
      if (Traits::parameters[i].kind != kPosition && Traits::parameters[i].exists &&
          Traits::parameters[j].exists &&
          Traits::parameters[j].kind == Traits::parameters[i].kind &&
          slot_of<Traits>(i) == slot_of<Traits>(j)) {
        return false;
      }
    }
  }
  return true;
}

template <typename Traits>
constexpr bool slots_are_in_range() {
  for (uint32_t i = 0; i < Traits::count; ++i) {
    if (Traits::parameters[i].kind != kPosition && slot_of<Traits>(i) >= kMaxBuffers) return false;
  }
  return true;
}

// A switched-off reference needs something to refer to: nothing reads it.
alignas(16) inline unsigned char absent_argument[4096];

template <typename P, typename Position>
SIM_HIDDEN METAL_FUNC P position_argument(const Position& position) {
  using E = metal::element_t<P>;
  if constexpr (!__is_array(Position)) {
    static_assert(!metal::is_vector_v<P>, "this thread attribute is a scalar");
    return static_cast<E>(position);
  } else if constexpr (metal::count_v<P> == 1) {
    return static_cast<E>(position[0]);
  } else if constexpr (metal::count_v<P> == 2) {
    return P{static_cast<E>(position[0]), static_cast<E>(position[1])};
  } else {
    return P{static_cast<E>(position[0]), static_cast<E>(position[1]), static_cast<E>(position[2])};
  }
}

template <typename Traits, uint32_t I>
SIM_HIDDEN METAL_FUNC decltype(auto) argument(const Launch* launch) {
  using P = typename Traits::types::template parameter<I>;
  constexpr ParameterAttributes attributes = Traits::parameters[I];
  if constexpr (attributes.kind == kPosition) {
    static_assert(metal::is_integral_v<P>, "a thread attribute needs an unsigned integer type");
    return position_argument<P>(Traits::template position<I>(self()));
  } else {
    static_assert(MemoryOf<P>::is_memory,
                  "a kernel parameter must be a pointer or reference to device, constant or "
                  "threadgroup memory, or have a thread attribute");
    using Pointer = typename MemoryOf<P>::pointer;
    constexpr uint32_t slot = slot_of<Traits>(I);
    void* address = nullptr;
    if constexpr (!attributes.exists) {
      address = __is_reference(P) ? absent_argument : nullptr;
    } else if constexpr (attributes.kind == kThreadgroupBuffer) {
      Thread* me = self();
      address = me->services->threadgroup_memory(me, slot, launch->threadgroup_bytes[slot], 16,
                                                 attributes.name);
    } else {
      address = launch->buffers[slot];
    }
    Pointer pointer = reinterpret_cast<Pointer>(reinterpret_cast<uintptr_t>(address));
    if constexpr (__is_reference(P)) {
      return static_cast<P>(*pointer);
    } else {
      return static_cast<P>(pointer);
    }
  }
}

// The entry point is not instrumented: a kernel inlined into it would not be either.
#ifdef SIM_INSTRUMENTED
#define SIM_CALL_KERNEL [[clang::noinline]]
#else
#define SIM_CALL_KERNEL [[clang::always_inline]]
#endif

template <typename Traits, uint32_t... I>
SIM_HIDDEN METAL_FUNC void run(const Launch* launch, metal::integer_sequence<uint32_t, I...>) {
  SIM_CALL_KERNEL Traits::function(argument<Traits, I>(launch)...);
}

template <typename Traits, uint32_t I>
constexpr ParameterRecord parameter_record() {
  using M = MemoryOf<typename Traits::types::template parameter<I>>;
  constexpr ParameterAttributes a = Traits::parameters[I];
  const bool is_buffer = a.kind != kPosition;
  return {a.name,
          is_buffer ? slot_of<Traits>(I) : 0,
          M::alignment,
          is_buffer,
          a.kind == kThreadgroupBuffer,
          M::is_writable,
          a.exists,
          M::is_constant};
}

template <typename Traits, typename Sequence>
struct Records;
template <typename Traits, uint32_t... I>
struct Records<Traits, metal::integer_sequence<uint32_t, I...>> {
  static constexpr ParameterRecord list[] = {parameter_record<Traits, I>()..., ParameterRecord{}};
};

// Threadgroup arrays of a kernel body follow the ids of its [[threadgroup(n)]] parameters.
template <typename A>
SIM_HIDDEN inline threadgroup A& threadgroup_array(uint32_t number, uint32_t alignment,
                                                   const char* name) {
  Thread* me = self();
  void* address = me->services->threadgroup_memory(
      me, kMaxBuffers + number, sizeof(A), alignment > alignof(A) ? alignment : alignof(A), name);
  return *reinterpret_cast<threadgroup A*>(reinterpret_cast<uintptr_t>(address));
}

// The bytes of a function constant as its type.
template <typename T, unsigned... Bytes>
constexpr T constant_value() {
  static_assert(sizeof(T) == sizeof...(Bytes), "the value of a function constant has another size");
  if constexpr (metal::is_vector_v<T>) {
    using E = metal::element_t<T>;
    struct Elements {
      E e[metal::count_v<T> == 3 ? 4 : metal::count_v<T>];
    };
    struct Raw {
      unsigned char b[sizeof...(Bytes)];
    };
    const Elements v = __builtin_bit_cast(Elements, Raw{{Bytes...}});
    if constexpr (metal::count_v<T> == 2)
      return T{v.e[0], v.e[1]};
    else if constexpr (metal::count_v<T> == 3)
      return T{v.e[0], v.e[1], v.e[2]};
    else
      return T{v.e[0], v.e[1], v.e[2], v.e[3]};
  } else {
    struct Raw {
      unsigned char b[sizeof...(Bytes)];
    };
    return __builtin_bit_cast(T, Raw{{Bytes...}});
  }
}

// How the rewriter asks clang for the value of an index: the warning spells it out.
template <unsigned Id, unsigned long Index>
struct [[deprecated]] function_constant_index {};

}  // namespace sim

#define SIM_KERNEL_ENTRY(Traits)                                                                  \
  static_assert(sim::slots_are_in_range<Traits>(), "a buffer index must be from 0 to 30");        \
  static_assert(sim::slots_are_distinct<Traits>(), "two kernel parameters have the same index");  \
  using sim_indices = metal::make_integer_sequence<uint32_t, Traits::count>;                      \
  extern "C" __attribute__((visibility("default"))) SIM_HIDDEN void sim_kernel_entry(             \
      const sim::Launch* launch) {                                                                \
    sim::run<Traits>(launch, sim_indices{});                                                      \
  }                                                                                               \
  extern "C" __attribute__((visibility("default"))) const sim::KernelRecord sim_kernel_record = { \
      sim::Records<Traits, sim_indices>::list, Traits::count, Traits::max_total_threads};
