// Vector constructors and conversions, which clang's ext_vector types lack.
#pragma once

namespace metal {

template <typename To, typename From>
constexpr To convert_element(From value) {
  return static_cast<To>(value);
}

template <typename V, typename A>
constexpr void append_elements(V& result, int& next, A value) {
  using E = element_t<V>;
  if constexpr (is_vector_v<A>) {
    for (int i = 0; i < count_v<A>; ++i) result[next++] = static_cast<E>(value[i]);
  } else {
    result[next++] = static_cast<E>(value);
  }
}

// MSL's V(args...): one scalar fills the vector, one vector is converted element by element, anything
// else is concatenated.
template <typename V, typename... A>
constexpr V make_vector(A... args) {
  using E = element_t<V>;
  constexpr int given = (0 + ... + count_v<A>);
  constexpr bool all_scalar = (true && ... && !is_vector_v<A>);
  if constexpr (sizeof...(A) == 0) {
    return V{};
  } else if constexpr (sizeof...(A) == 1 && all_scalar) {
    return V(static_cast<E>(args)...);
  } else if constexpr (sizeof...(A) == 1) {
    static_assert(given == count_v<V>, "vector conversion: the element counts differ");
    if constexpr (is_same_v<E, bool>) {
      V result{};
      int next = 0;
      (append_elements(result, next, args), ...);
      return result;
    } else {
      return (__builtin_convertvector(args, V), ...);
    }
  } else {
    static_assert(given == count_v<V>, "vector constructor: wrong number of elements");
    if constexpr (all_scalar) {
      return V{static_cast<E>(args)...};
    } else {
      V result{};
      int next = 0;
      (append_elements(result, next, args), ...);
      return result;
    }
  }
}

// What the rewriter puts in place of vec<T, N>(args...).
template <typename T, int N, typename... A>
constexpr vec<T, N> make_vec(A... args) {
  return make_vector<vec<T, N>>(args...);
}

// Element i of a vector; a scalar is all its elements.
template <typename T>
constexpr element_t<T> element_at(T value, int i) {
  if constexpr (is_vector_v<T>) {
    return value[i];
  } else {
    return value;
  }
}

// R(f(element...), ...) over the elements of R.
template <typename R, typename F, typename... A>
METAL_FUNC constexpr R map(F f, A... args) {
  if constexpr (is_vector_v<R>) {
    R result{};
#pragma clang loop unroll(full)
    for (int i = 0; i < count_v<R>; ++i) {
      result[i] = static_cast<element_t<R>>(f(element_at(args, i)...));
    }
    return result;
  } else {
    return static_cast<R>(f(args...));
  }
}

}  // namespace metal
