// metal_integer
#pragma once

namespace metal {

template <typename T>
METAL_FUNC constexpr T clz(T x) {
  using U = make_unsigned_t<element_t<T>>;
  return map<T>(
      [](element_t<T> a) {
        return a == 0 ? int(sizeof(a) * 8) : __builtin_clzll(U(a)) - int(64 - sizeof(a) * 8);
      },
      x);
}
template <typename T>
METAL_FUNC constexpr T ctz(T x) {
  using U = make_unsigned_t<element_t<T>>;
  return map<T>([](element_t<T> a) { return a == 0 ? int(sizeof(a) * 8) : __builtin_ctzll(U(a)); },
                x);
}
template <typename T>
METAL_FUNC constexpr T popcount(T x) {
  using U = make_unsigned_t<element_t<T>>;
  return map<T>([](element_t<T> a) { return __builtin_popcountll(U(a)); }, x);
}
template <typename T>
METAL_FUNC constexpr T reverse_bits(T x) {
  using U = make_unsigned_t<element_t<T>>;
  return map<T>(
      [](element_t<T> a) { return U(__builtin_bitreverse64(U(a)) >> (64 - sizeof(a) * 8)); }, x);
}
template <typename T, typename U>
METAL_FUNC constexpr T rotate(T x, U by) {
  using E = make_unsigned_t<element_t<T>>;
  constexpr int bits = sizeof(E) * 8;
  return map<T>(
      [](element_t<T> a, auto b) {
        const int n = int(b) & (bits - 1);
        return n == 0 ? E(a) : E(E(a) << n | E(a) >> (bits - n));
      },
      x, by);
}
template <typename T>
METAL_FUNC constexpr T mulhi(T x, T y) {
  using E = element_t<T>;
  using Wide = conditional_t<is_signed_v<E>, __int128, unsigned __int128>;
  return map<T>([](E a, E b) { return Wide(a) * Wide(b) >> (sizeof(E) * 8); }, x, y);
}
template <typename T>
METAL_FUNC constexpr T madhi(T a, T b, T c) {
  return mulhi(a, b) + c;
}
template <typename T>
METAL_FUNC constexpr T mul24(T x, T y) {
  return x * y;
}
template <typename T>
METAL_FUNC constexpr T mad24(T x, T y, T z) {
  return x * y + z;
}
template <typename T>
METAL_FUNC constexpr T addsat(T x, T y) {
  return __builtin_elementwise_add_sat(x, y);
}
template <typename T>
METAL_FUNC constexpr T subsat(T x, T y) {
  return __builtin_elementwise_sub_sat(x, y);
}
template <typename T>
METAL_FUNC constexpr auto absdiff(T x, T y) {
  using E = element_t<T>;
  return map<T>([](E a, E b) { return a > b ? a - b : b - a; }, x, y);
}
template <typename T>
METAL_FUNC constexpr T hadd(T x, T y) {
  return (x >> T(1)) + (y >> T(1)) + (x & y & T(1));
}
template <typename T>
METAL_FUNC constexpr T extract_bits(T x, uint offset, uint bits) {
  if (bits == 0) return T(0);
  constexpr uint width = sizeof(T) * 8;
  return T(T(x << (width - offset - bits)) >> (width - bits));
}
template <typename T>
METAL_FUNC constexpr T insert_bits(T base, T insert, uint offset, uint bits) {
  using U = make_unsigned_t<T>;
  if (bits == 0) return base;
  const U mask = U((~U(0)) >> (sizeof(T) * 8 - bits)) << offset;
  return T((U(base) & ~mask) | (U(insert) << offset & mask));
}

}  // namespace metal
