// metal_array, and the logging class as a sink.
#pragma once

namespace metal {

template <typename T, size_t N>
struct array {
  T elements[N];
  using value_type = T;
  constexpr size_t size() const { return N; }
  constexpr bool empty() const { return N == 0; }
  constexpr T& operator[](size_t i) { return elements[i]; }
  constexpr const T& operator[](size_t i) const { return elements[i]; }
  constexpr T& front() { return elements[0]; }
  constexpr T& back() { return elements[N - 1]; }
  constexpr T* data() { return elements; }
  constexpr T* begin() { return elements; }
  constexpr T* end() { return elements + N; }
  constexpr const T* begin() const { return elements; }
  constexpr const T* end() const { return elements + N; }
};

struct os_log {
  constexpr os_log(const constant char*, const constant char*) {}
  template <typename... A>
  void log_debug(const constant char*, A...) const {}
  template <typename... A>
  void log_info(const constant char*, A...) const {}
  template <typename... A>
  void log_error(const constant char*, A...) const {}
};

}  // namespace metal
