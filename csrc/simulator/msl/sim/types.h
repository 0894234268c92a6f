// Scalar and vector types. Vectors are clang's ext_vector types: memory layout, swizzles and operators
// are MSL's. Constructors such as float4(a, b) become calls of make_vector in the rewriter.
#pragma once

#include <stdint.h>

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef _Float16 half;
typedef __bf16 bfloat;

namespace metal {

template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));

template <typename T, int N>
using packed_vec = T __attribute__((ext_vector_type(N), aligned(sizeof(T))));

}  // namespace metal

#define SIM_VECTORS(T)                                                             \
  typedef metal::vec<T, 2> T##2;                                                   \
  typedef metal::vec<T, 3> T##3;                                                   \
  typedef metal::vec<T, 4> T##4;                                                   \
  typedef T packed_##T##2 __attribute__((ext_vector_type(2), aligned(sizeof(T)))); \
  typedef T packed_##T##4 __attribute__((ext_vector_type(4), aligned(sizeof(T)))); \
  namespace metal {                                                                \
  using ::T##2;                                                                    \
  using ::T##3;                                                                    \
  using ::T##4;                                                                    \
  using ::packed_##T##2;                                                           \
  using ::packed_##T##4;                                                           \
  }

SIM_VECTORS(bool)
SIM_VECTORS(char)
SIM_VECTORS(uchar)
SIM_VECTORS(short)
SIM_VECTORS(ushort)
SIM_VECTORS(int)
SIM_VECTORS(uint)
SIM_VECTORS(long)
SIM_VECTORS(ulong)
SIM_VECTORS(half)
SIM_VECTORS(float)
SIM_VECTORS(bfloat)

#undef SIM_VECTORS

constexpr half operator""h(long double value) {
  return static_cast<half>(value);
}
constexpr half operator""h(unsigned long long value) {
  return static_cast<half>(value);
}

#define SIM_PACKED3(T)                                           \
  struct packed_##T##3 {                                         \
    T x, y, z;                                                   \
    packed_##T##3() = default;                                   \
    constexpr packed_##T##3(T a, T b, T c) : x(a), y(b), z(c) {} \
    constexpr packed_##T##3(T##3 v) : x(v.x), y(v.y), z(v.z) {}  \
    constexpr operator T##3() const {                            \
      return T##3 {x, y, z};                                     \
    }                                                            \
  };

SIM_PACKED3(float)
SIM_PACKED3(half)
SIM_PACKED3(int)
SIM_PACKED3(uint)

#undef SIM_PACKED3

namespace metal {

using ::bfloat;
using ::half;
using ::ptrdiff_t;
using ::size_t;
using ::uchar;
using ::uint;
using ::ulong;
using ::ushort;

template <typename To, typename From>
constexpr To as_type_of(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type: the types must have the same size");
  return __builtin_bit_cast(To, from);
}

}  // namespace metal

// A keyword in MSL, hence found without a namespace.
template <typename To, typename From>
constexpr To as_type(From from) {
  return metal::as_type_of<To>(from);
}
