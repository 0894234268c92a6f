// metal_math, metal_common and metal_relational for float, half, bfloat and their vectors. half and
// bfloat are computed in float and rounded once.
#pragma once

namespace metal {

// The type a mixed call is made in. Equal types; a scalar beside a vector; an integer beside a float.
// Everything else is ambiguous in MSL too.
template <typename T, typename U, typename = void>
struct common_type {};
template <typename T>
struct common_type<T, T> {
  using type = T;
};
template <typename T, typename U>
struct common_type<T, U, enable_if_t<is_vector_v<T> && !is_vector_v<U> && is_arithmetic_v<U>>> {
  using type = T;
};
template <typename T, typename U>
struct common_type<T, U, enable_if_t<!is_vector_v<T> && is_vector_v<U> && is_arithmetic_v<T>>> {
  using type = U;
};
template <typename T, typename U>
using common_t = typename common_type<T, U>::type;

template <typename T, typename U, typename = void>
struct common_float_type : common_type<T, U> {};
template <typename T, typename U>
struct common_float_type<
    T, U,
    enable_if_t<!is_vector_v<T> && !is_vector_v<U> && is_floating_point_v<T> && is_integral_v<U>>> {
  using type = T;
};
template <typename T, typename U>
struct common_float_type<
    T, U,
    enable_if_t<!is_vector_v<T> && !is_vector_v<U> && is_integral_v<T> && is_floating_point_v<U>>> {
  using type = U;
};
template <typename R>
using only_float_t = enable_if_t<is_floating_point_v<R>, R>;
template <typename T, typename U>
using common_float_t = only_float_t<typename common_float_type<T, U>::type>;

// Booleans of the same shape.
template <typename T>
using bool_like_t = typename conditional < is_vector_v<T>,
      vec<bool, count_v<T><2 ? 2 : count_v<T>>, bool>::type;

#define SIM_UNARY(name, ...)                                        \
  template <typename T>                                             \
  METAL_FUNC only_float_t<T> name(T x) {                            \
    return map<T>([](float a) -> float { return __VA_ARGS__; }, x); \
  }
#define SIM_BINARY(name, ...)                                                                      \
  template <typename T, typename U>                                                                \
  METAL_FUNC common_float_t<T, U> name(T x, U y) {                                                 \
    return map<common_float_t<T, U>>([](float a, float b) -> float { return __VA_ARGS__; }, x, y); \
  }
#define SIM_TERNARY(name, ...)                                                    \
  template <typename T, typename U, typename V>                                   \
  METAL_FUNC common_float_t<common_float_t<T, U>, V> name(T x, U y, V z) {        \
    return map<common_float_t<common_float_t<T, U>, V>>(                          \
        [](float a, float b, float c) -> float { return __VA_ARGS__; }, x, y, z); \
  }
#define SIM_EXPONENTIAL(name, ...)                                  \
  template <typename T>                                             \
  METAL_FUNC only_float_t<T> name(T x) {                            \
    sim::count_exponentials(count_v<T>);                            \
    return map<T>([](float a) -> float { return __VA_ARGS__; }, x); \
  }

SIM_EXPONENTIAL(exp, __builtin_expf(a))
SIM_EXPONENTIAL(exp2, __builtin_exp2f(a))
SIM_EXPONENTIAL(exp10, __builtin_exp10f(a))
SIM_UNARY(log, __builtin_logf(a))
SIM_UNARY(log2, __builtin_log2f(a))
SIM_UNARY(log10, __builtin_log10f(a))
SIM_UNARY(sqrt, __builtin_sqrtf(a))
SIM_UNARY(rsqrt, 1.0f / __builtin_sqrtf(a))
SIM_UNARY(sin, __builtin_sinf(a))
SIM_UNARY(cos, __builtin_cosf(a))
SIM_UNARY(tan, __builtin_tanf(a))
SIM_UNARY(asin, __builtin_asinf(a))
SIM_UNARY(acos, __builtin_acosf(a))
SIM_UNARY(atan, __builtin_atanf(a))
SIM_UNARY(sinh, __builtin_sinhf(a))
SIM_UNARY(cosh, __builtin_coshf(a))
SIM_UNARY(tanh, __builtin_tanhf(a))
SIM_UNARY(asinh, __builtin_asinhf(a))
SIM_UNARY(acosh, __builtin_acoshf(a))
SIM_UNARY(atanh, __builtin_atanhf(a))
SIM_UNARY(sinpi, __builtin_sinf(a* M_PI_F))
SIM_UNARY(cospi, __builtin_cosf(a* M_PI_F))
SIM_UNARY(tanpi, __builtin_tanf(a* M_PI_F))
SIM_UNARY(floor, __builtin_floorf(a))
SIM_UNARY(ceil, __builtin_ceilf(a))
SIM_UNARY(trunc, __builtin_truncf(a))
SIM_UNARY(round, __builtin_roundf(a))
SIM_UNARY(rint, __builtin_rintf(a))
SIM_UNARY(fabs, __builtin_fabsf(a))
SIM_UNARY(fract, __builtin_fminf(a - __builtin_floorf(a), 0x1.fffffep-1f))
SIM_UNARY(sign, a != a ? 0.0f : a == 0.0f ? a : a > 0.0f ? 1.0f : -1.0f)
SIM_UNARY(saturate, __builtin_fminf(__builtin_fmaxf(a, 0.0f), 1.0f))

SIM_BINARY(pow, __builtin_powf(a, b))
SIM_BINARY(powr, __builtin_powf(a, b))
SIM_BINARY(atan2, __builtin_atan2f(a, b))
SIM_BINARY(fmod, __builtin_fmodf(a, b))
SIM_BINARY(fmax, __builtin_fmaxf(a, b))
SIM_BINARY(fmin, __builtin_fminf(a, b))
SIM_BINARY(fdim, __builtin_fdimf(a, b))
SIM_BINARY(divide, a / b)
SIM_BINARY(copysign, __builtin_copysignf(a, b))
SIM_BINARY(step, b < a ? 0.0f : 1.0f)

SIM_TERNARY(fma, __builtin_fmaf(a, b, c))
SIM_TERNARY(mix, a + (b - a) * c)
SIM_TERNARY(fmax3, __builtin_fmaxf(a, __builtin_fmaxf(b, c)))
SIM_TERNARY(fmin3, __builtin_fminf(a, __builtin_fminf(b, c)))

#undef SIM_UNARY
#undef SIM_BINARY
#undef SIM_TERNARY
#undef SIM_EXPONENTIAL

// max and min ignore a NaN on one side, as fmax and fmin do.
#define SIM_EXTREMUM(name, builtin, compare)                                  \
  template <typename T, typename U>                                           \
  METAL_FUNC constexpr common_t<T, U> name(T x, U y) {                        \
    using R = common_t<T, U>;                                                 \
    using E = element_t<R>;                                                   \
    if constexpr (is_floating_point_v<R>) {                                   \
      return map<R>([](float a, float b) { return builtin(a, b); }, x, y);    \
    } else {                                                                  \
      return map<R>([](E a, E b) -> E { return a compare b ? a : b; }, x, y); \
    }                                                                         \
  }                                                                           \
  template <typename T, typename U, typename V>                               \
  METAL_FUNC constexpr auto name##3(T x, U y, V z) {                          \
    return name(name(x, y), z);                                               \
  }
SIM_EXTREMUM(max, __builtin_fmaxf, >)
SIM_EXTREMUM(min, __builtin_fminf, <)
#undef SIM_EXTREMUM

template <typename T, typename U, typename V>
METAL_FUNC constexpr common_t<common_t<T, U>, V> clamp(T x, U low, V high) {
  return min(max(x, low), high);
}
template <typename T>
METAL_FUNC constexpr T median3(T x, T y, T z) {
  return max(min(x, y), min(max(x, y), z));
}

template <typename T>
METAL_FUNC constexpr T abs(T x) {
  if constexpr (is_floating_point_v<T>) {
    return map<T>([](float a) { return __builtin_fabsf(a); }, x);
  } else {
    return map<T>([](element_t<T> a) { return a < 0 ? -a : a; }, x);
  }
}

template <typename T>
METAL_FUNC only_float_t<T> smoothstep(T low, T high, T x) {
  const T t = clamp((x - low) / (high - low), T(0), T(1));
  return t * t * (T(3) - T(2) * t);
}

template <typename T>
METAL_FUNC only_float_t<T> sincos(T x, thread T& cosine) {
  cosine = cos(x);
  return sin(x);
}
template <typename T>
METAL_FUNC only_float_t<T> modf(T x, thread T& whole) {
  whole = trunc(x);
  return copysign(isinf(x) ? T(0) : x - whole, x);
}
template <typename T>
METAL_FUNC only_float_t<T> ldexp(T x, int exponent) {
  return map<T>([exponent](float a) { return __builtin_ldexpf(a, exponent); }, x);
}
template <typename T>
METAL_FUNC only_float_t<T> frexp(T x, thread int& exponent) {
  return static_cast<T>(__builtin_frexpf(x, &exponent));
}
template <typename T>
METAL_FUNC enable_if_t<is_floating_point_v<T>, int> ilogb(T x) {
  return __builtin_ilogbf(x);
}
template <typename T>
METAL_FUNC only_float_t<T> nextafter(T x, T y) {
  static_assert(is_same_v<T, float>, "nextafter: only float is supported");
  return __builtin_nextafterf(x, y);
}

#define SIM_PREDICATE(name, ...)                                                       \
  template <typename T>                                                                \
  METAL_FUNC constexpr enable_if_t<is_floating_point_v<T>, bool_like_t<T>> name(T x) { \
    return map<bool_like_t<T>>([](float a) -> bool { return __VA_ARGS__; }, x);        \
  }
SIM_PREDICATE(isnan, a != a)
SIM_PREDICATE(isinf, __builtin_isinf(a))
SIM_PREDICATE(isfinite, __builtin_isfinite(a))
SIM_PREDICATE(isnormal, __builtin_isnormal(a))
SIM_PREDICATE(signbit, __builtin_signbit(a))
#undef SIM_PREDICATE

template <typename T>
METAL_FUNC constexpr bool_like_t<T> isunordered(T x, T y) {
  return map<bool_like_t<T>>([](float a, float b) -> bool { return a != a || b != b; }, x, y);
}
template <typename T>
METAL_FUNC constexpr bool_like_t<T> isordered(T x, T y) {
  return map<bool_like_t<T>>([](float a, float b) -> bool { return a == a && b == b; }, x, y);
}

template <typename T>
METAL_FUNC constexpr bool all(T x) {
  bool result = true;
  for (int i = 0; i < count_v<T>; ++i) result = result && element_at(x, i);
  return result;
}
template <typename T>
METAL_FUNC constexpr bool any(T x) {
  bool result = false;
  for (int i = 0; i < count_v<T>; ++i) result = result || element_at(x, i);
  return result;
}

// select(a, b, c): b where c holds.
template <typename T, typename U, typename C>
METAL_FUNC constexpr common_t<T, U> select(T a, U b, C condition) {
  using E = element_t<common_t<T, U>>;
  return map<common_t<T, U>>([](E x, E y, auto c) -> E { return c ? y : x; }, a, b, condition);
}

}  // namespace metal
