// metal::fast and metal::precise: both as exact as the plain functions, which MSL allows.
#pragma once

namespace metal {

#define SIM_FLOAT_FUNCTIONS \
  using metal::exp;         \
  using metal::exp2;        \
  using metal::exp10;       \
  using metal::log;         \
  using metal::log2;        \
  using metal::log10;       \
  using metal::sqrt;        \
  using metal::rsqrt;       \
  using metal::sin;         \
  using metal::cos;         \
  using metal::tan;         \
  using metal::asin;        \
  using metal::acos;        \
  using metal::atan;        \
  using metal::sinh;        \
  using metal::cosh;        \
  using metal::tanh;        \
  using metal::asinh;       \
  using metal::acosh;       \
  using metal::atanh;       \
  using metal::sinpi;       \
  using metal::cospi;       \
  using metal::tanpi;       \
  using metal::floor;       \
  using metal::ceil;        \
  using metal::trunc;       \
  using metal::round;       \
  using metal::rint;        \
  using metal::fabs;        \
  using metal::abs;         \
  using metal::fract;       \
  using metal::sign;        \
  using metal::saturate;    \
  using metal::pow;         \
  using metal::powr;        \
  using metal::atan2;       \
  using metal::fmod;        \
  using metal::fmax;        \
  using metal::fmin;        \
  using metal::fdim;        \
  using metal::divide;      \
  using metal::copysign;    \
  using metal::fma;         \
  using metal::max;         \
  using metal::min;         \
  using metal::clamp;       \
  using metal::sincos;      \
  using metal::ldexp;       \
  using metal::frexp;       \
  using metal::modf;        \
  using metal::isnan;       \
  using metal::isinf;       \
  using metal::isfinite;    \
  using metal::isnormal;    \
  using metal::signbit;     \
  using metal::mix;

namespace fast {
SIM_FLOAT_FUNCTIONS
}
namespace precise {
SIM_FLOAT_FUNCTIONS
}
#undef SIM_FLOAT_FUNCTIONS

}  // namespace metal
