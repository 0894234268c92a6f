// metal_geometric
#pragma once

namespace metal {

template <typename T>
METAL_FUNC element_t<T> dot(T x, T y) {
  element_t<T> total = x[0] * y[0];
  for (int i = 1; i < count_v<T>; ++i) total += x[i] * y[i];
  return total;
}
template <typename T>
METAL_FUNC element_t<T> length_squared(T x) {
  return dot(x, x);
}
template <typename T>
METAL_FUNC element_t<T> length(T x) {
  return sqrt(dot(x, x));
}
template <typename T>
METAL_FUNC element_t<T> distance(T x, T y) {
  return length(x - y);
}
template <typename T>
METAL_FUNC element_t<T> distance_squared(T x, T y) {
  return length_squared(x - y);
}
template <typename T>
METAL_FUNC T normalize(T x) {
  return x * rsqrt(dot(x, x));
}
template <typename T>
METAL_FUNC vec<T, 3> cross(vec<T, 3> x, vec<T, 3> y) {
  return x.yzx * y.zxy - x.zxy * y.yzx;
}

}  // namespace metal
