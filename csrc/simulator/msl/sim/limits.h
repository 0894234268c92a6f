// metal_limits, and the constants of the standard library that MSL has as macros.
#pragma once

#define INFINITY __builtin_inff()
#define HUGE_VALF __builtin_inff()
#define NAN __builtin_nanf("")
#define MAXFLOAT FLT_MAX
#define MAXHALF HALF_MAX

#define CHAR_BIT 8
#define CHAR_MAX SCHAR_MAX
#define CHAR_MIN SCHAR_MIN
#define SCHAR_MAX 127
#define SCHAR_MIN (-128)
#define UCHAR_MAX 255
#define SHRT_MAX 32767
#define SHRT_MIN (-32768)
#define USHRT_MAX 65535
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define LONG_MAX 9223372036854775807l
#define LONG_MIN (-9223372036854775807l - 1)
#define ULONG_MAX 18446744073709551615ul

#define FLT_DIG 6
#define FLT_MANT_DIG 24
#define FLT_MAX_10_EXP 38
#define FLT_MAX_EXP 128
#define FLT_MIN_10_EXP (-37)
#define FLT_MIN_EXP (-125)
#define FLT_RADIX 2
#define FLT_MAX 0x1.fffffep127f
#define FLT_MIN 0x1.0p-126f
#define FLT_EPSILON 0x1.0p-23f

#define HALF_DIG 3
#define HALF_MANT_DIG 11
#define HALF_MAX (half(0x1.ffcp15f))
#define HALF_MIN (half(0x1.0p-14f))
#define HALF_EPSILON (half(0x1.0p-10f))

#define BFLT_MAX (bfloat(0x1.fep127f))
#define BFLT_MIN (bfloat(0x1.0p-126f))
#define BFLT_EPSILON (bfloat(0x1.0p-7f))

#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LOG10E_F 0.434294481903251827651f
#define M_LN2_F 0.693147180559945309417f
#define M_LN10_F 2.30258509299404568402f
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_PI_4_F 0.785398163397448309616f
#define M_1_PI_F 0.318309886183790671538f
#define M_2_PI_F 0.636619772367581343076f
#define M_2_SQRTPI_F 1.12837916709551257390f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.707106781186547524401f

#define M_E_H half(M_E_F)
#define M_LOG2E_H half(M_LOG2E_F)
#define M_LN2_H half(M_LN2_F)
#define M_PI_H half(M_PI_F)
#define M_SQRT2_H half(M_SQRT2_F)

namespace metal {

template <typename T>
struct numeric_limits {
  static constexpr constant bool is_specialized = false;
};

#define SIM_INTEGER_LIMITS(T, low, high)                              \
  template <>                                                         \
  struct numeric_limits<T> {                                          \
    static constexpr constant bool is_specialized = true;             \
    static constexpr constant bool is_integer = true;                 \
    static constexpr constant bool is_signed = T(-1) < T(0);          \
    static constexpr constant bool has_infinity = false;              \
    static constexpr constant bool has_quiet_NaN = false;             \
    static constexpr constant int digits = sizeof(T) * 8 - is_signed; \
    static constexpr T min() {                                        \
      return low;                                                     \
    }                                                                 \
    static constexpr T lowest() {                                     \
      return low;                                                     \
    }                                                                 \
    static constexpr T max() {                                        \
      return high;                                                    \
    }                                                                 \
    static constexpr T epsilon() {                                    \
      return T(0);                                                    \
    }                                                                 \
  };
SIM_INTEGER_LIMITS(bool, false, true)
SIM_INTEGER_LIMITS(char, SCHAR_MIN, SCHAR_MAX)
SIM_INTEGER_LIMITS(uchar, 0, UCHAR_MAX)
SIM_INTEGER_LIMITS(short, SHRT_MIN, SHRT_MAX)
SIM_INTEGER_LIMITS(ushort, 0, USHRT_MAX)
SIM_INTEGER_LIMITS(int, INT_MIN, INT_MAX)
SIM_INTEGER_LIMITS(uint, 0, UINT_MAX)
SIM_INTEGER_LIMITS(long, LONG_MIN, LONG_MAX)
SIM_INTEGER_LIMITS(ulong, 0, ULONG_MAX)
#undef SIM_INTEGER_LIMITS

#define SIM_FLOAT_LIMITS(T, prefix, mantissa)             \
  template <>                                             \
  struct numeric_limits<T> {                              \
    static constexpr constant bool is_specialized = true; \
    static constexpr constant bool is_integer = false;    \
    static constexpr constant bool is_signed = true;      \
    static constexpr constant bool has_infinity = true;   \
    static constexpr constant bool has_quiet_NaN = true;  \
    static constexpr constant int digits = mantissa;      \
    static constexpr T min() {                            \
      return prefix##_MIN;                                \
    }                                                     \
    static constexpr T lowest() {                         \
      return -prefix##_MAX;                               \
    }                                                     \
    static constexpr T max() {                            \
      return prefix##_MAX;                                \
    }                                                     \
    static constexpr T epsilon() {                        \
      return prefix##_EPSILON;                            \
    }                                                     \
    static constexpr T infinity() {                       \
      return T(INFINITY);                                 \
    }                                                     \
    static constexpr T quiet_NaN() {                      \
      return T(NAN);                                      \
    }                                                     \
    static constexpr T signaling_NaN() {                  \
      return T(NAN);                                      \
    }                                                     \
  };
SIM_FLOAT_LIMITS(float, FLT, 24)
SIM_FLOAT_LIMITS(half, HALF, 11)
SIM_FLOAT_LIMITS(bfloat, BFLT, 8)
#undef SIM_FLOAT_LIMITS

}  // namespace metal
