// Apple's compiler builtins, as far as published Metal code calls them by name (MLX does, for bfloat).
#pragma once

#define __METAL_PRECISE_MATH__ 0
#define __METAL_FAST_MATH__ 1
#define __METAL_MAYBE_FAST_MATH__ 1

namespace metal {

template <typename... A>
METAL_FUNC auto fmedian3(A... a) {
  return median3(a...);
}

}  // namespace metal

// The last argument chooses fast or precise maths, which are one here.
#define SIM_MATHS(name)                   \
  template <typename T>                   \
  METAL_FUNC T __metal_##name(T x, int) { \
    return metal::name(x);                \
  }                                       \
  template <typename T>                   \
  METAL_FUNC T __metal_##name(T x) {      \
    return metal::name(x);                \
  }
#define SIM_MATHS_2(name)                      \
  template <typename T>                        \
  METAL_FUNC T __metal_##name(T x, T y, int) { \
    return metal::name(x, y);                  \
  }                                            \
  template <typename T>                        \
  METAL_FUNC T __metal_##name(T x, T y) {      \
    return metal::name(x, y);                  \
  }
#define SIM_MATHS_3(name)                           \
  template <typename T>                             \
  METAL_FUNC T __metal_##name(T x, T y, T z, int) { \
    return metal::name(x, y, z);                    \
  }                                                 \
  template <typename T>                             \
  METAL_FUNC T __metal_##name(T x, T y, T z) {      \
    return metal::name(x, y, z);                    \
  }
SIM_MATHS(acos)
SIM_MATHS(acosh)
SIM_MATHS(asin)
SIM_MATHS(asinh)
SIM_MATHS(atan)
SIM_MATHS(atanh)
SIM_MATHS(ceil)
SIM_MATHS(cos)
SIM_MATHS(cosh)
SIM_MATHS(cospi)
SIM_MATHS(exp)
SIM_MATHS(exp10)
SIM_MATHS(exp2)
SIM_MATHS(fabs)
SIM_MATHS(floor)
SIM_MATHS(fract)
SIM_MATHS(log)
SIM_MATHS(log10)
SIM_MATHS(log2)
SIM_MATHS(rint)
SIM_MATHS(round)
SIM_MATHS(rsqrt)
SIM_MATHS(sin)
SIM_MATHS(sinh)
SIM_MATHS(sinpi)
SIM_MATHS(sqrt)
SIM_MATHS(tan)
SIM_MATHS(tanh)
SIM_MATHS(tanpi)
SIM_MATHS(trunc)
SIM_MATHS_2(atan2)
SIM_MATHS_2(divide)
SIM_MATHS_2(fmax)
SIM_MATHS_2(fmin)
SIM_MATHS_2(fmod)
SIM_MATHS_2(nextafter)
SIM_MATHS_2(pow)
SIM_MATHS_2(powr)
SIM_MATHS_3(fma)
SIM_MATHS_3(fmax3)
SIM_MATHS_3(fmedian3)
SIM_MATHS_3(fmin3)
#undef SIM_MATHS
#undef SIM_MATHS_2
#undef SIM_MATHS_3

METAL_FUNC float __metal_ldexp(float x, int k, int = 0) {
  return metal::ldexp(x, k);
}
METAL_FUNC float __metal_frexp(float x, thread int* exponent) {
  return metal::frexp(x, *exponent);
}
METAL_FUNC ushort __metal_get_simdgroup_size(ushort) {
  return sim::kSimdWidth;
}

#define SIM_LANES(name)                      \
  template <typename T>                      \
  METAL_FUNC T __metal_simd_##name(T data) { \
    return metal::simd_##name(data);         \
  }
#define SIM_SHUFFLE(name)                                 \
  template <typename T>                                   \
  METAL_FUNC T __metal_simd_##name(T data, ushort lane) { \
    return metal::simd_##name(data, lane);                \
  }
#define SIM_FILL(name)                                                               \
  template <typename T>                                                              \
  METAL_FUNC T __metal_simd_##name(T data, T filling, ushort delta, ushort modulo) { \
    return metal::simd_##name(data, filling, delta, modulo);                         \
  }
SIM_LANES(max)
SIM_LANES(min)
SIM_LANES(sum)
SIM_LANES(product)
SIM_LANES(prefix_exclusive_product)
SIM_LANES(prefix_exclusive_sum)
SIM_LANES(prefix_inclusive_product)
SIM_LANES(prefix_inclusive_sum)
METAL_FUNC float __metal_simd_xor(float data) {  // declared for bfloat, never meant to be called
  return as_type<float>(metal::simd_xor(as_type<uint>(data)));
}
SIM_SHUFFLE(broadcast)
SIM_SHUFFLE(shuffle)
SIM_SHUFFLE(shuffle_down)
SIM_SHUFFLE(shuffle_rotate_down)
SIM_SHUFFLE(shuffle_rotate_up)
SIM_SHUFFLE(shuffle_up)
SIM_SHUFFLE(shuffle_xor)
SIM_FILL(shuffle_and_fill_down)
SIM_FILL(shuffle_and_fill_up)
#undef SIM_LANES
#undef SIM_SHUFFLE
#undef SIM_FILL
