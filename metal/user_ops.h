// Operators of user-defined scores and masks that MSL has not, or has with other results than torch: the
// ends of a range, NaN, negative operands. Integers never fault: divided by 0 they are 0.
#pragma once

#include "attn_params.h"

namespace flash_mps {

// Whether user_score.h was replaced by code of the caller's.
constant bool has_user_code [[function_constant(kHasUserCodeConstant)]];

// Offset of element `index` of a dimension, given as its size and stride. Negative indices count from
// the end; what is beyond either end becomes the element there, so nothing outside is read.
inline int64_t user_offset(int64_t index, constant int64_t* dimension) {
  const int64_t last = dimension[0] - 1;
  const int64_t wrapped = index < 0 ? index + dimension[0] : index;
  return (wrapped < 0 ? 0 : (wrapped > last ? last : wrapped)) * dimension[1];
}

template <typename T>
inline T user_abs(T x) {
  return x < 0 ? -x : x;
}

inline float user_abs(float x) {
  return metal::abs(x);
}

template <typename T>
inline T user_minimum(T a, T b) {
  return a < b ? a : b;
}

// A NaN stays one.
inline float user_minimum(float a, float b) {
  return metal::isnan(a) || a < b ? a : b;
}

template <typename T>
inline T user_maximum(T a, T b) {
  return a > b ? a : b;
}

inline float user_maximum(float a, float b) {
  return metal::isnan(a) || a > b ? a : b;
}

// The quotient, rounded to zero. The smallest integer has no positive, so -1 does not divide.
template <typename T>
inline T user_trunc_divide(T a, T b) {
  return b == 0 ? 0 : (b == -1 ? -a : a / b);
}

inline float user_trunc_divide(float a, float b) {
  return metal::trunc(a / b);
}

// The rest of it, with the sign of a.
template <typename T>
inline T user_fmod(T a, T b) {
  return b == 0 || b == -1 ? 0 : a % b;
}

inline float user_fmod(float a, float b) {
  return metal::fmod(a, b);
}

// The quotient, rounded down.
template <typename T>
inline T user_floor_divide(T a, T b) {
  const T quotient = user_trunc_divide(a, b);
  const bool is_above = user_fmod(a, b) != 0 && (a < 0) != (b < 0);
  return is_above ? quotient - 1 : quotient;
}

// From the exact rest, as Python does it: a / b alone may round up to the next whole number.
inline float user_floor_divide(float a, float b) {
  if (b == 0.0f) {
    return a / b;
  }
  const float rest = metal::fmod(a, b);
  float quotient = (a - rest) / b;
  if (rest != 0.0f && (rest < 0.0f) != (b < 0.0f)) {
    quotient -= 1.0f;
  }
  if (quotient == 0.0f) {
    return metal::copysign(0.0f, a / b);
  }
  const float whole = metal::floor(quotient);
  return quotient - whole > 0.5f ? whole + 1.0f : whole;
}

// The rest of that, with the sign of b.
template <typename T>
inline T user_remainder(T a, T b) {
  const T rest = user_fmod(a, b);
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

inline float user_remainder(float a, float b) {
  const float rest = metal::fmod(a, b);
  return rest != 0.0f && (rest < 0.0f) != (b < 0.0f) ? rest + b : rest;
}

// Shifts by more bits than there are, or by fewer than none, leave nothing but the sign.
template <typename T>
inline T user_shift_left(T a, T b) {
  return b < 0 || b >= T(8 * sizeof(T)) ? 0 : a << b;
}

template <typename T>
inline T user_shift_right(T a, T b) {
  const T most = T(8 * sizeof(T)) - 1;
  return a >> (b < 0 || b > most ? most : b);
}

}  // namespace flash_mps
