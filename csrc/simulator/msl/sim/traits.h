// metal_type_traits
#pragma once

namespace metal {

template <typename T, T v>
struct integral_constant {
  static constexpr constant T value = v;
  using value_type = T;
  using type = integral_constant;
  constexpr operator T() const noexcept { return v; }
  constexpr T operator()() const noexcept { return v; }
};

template <bool B>
using bool_constant = integral_constant<bool, B>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <bool B, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> {
  using type = T;
};
template <bool B, typename T = void>
using enable_if_t = typename enable_if<B, T>::type;

template <bool B, typename T, typename F>
struct conditional {
  using type = T;
};
template <typename T, typename F>
struct conditional<false, T, F> {
  using type = F;
};
template <bool B, typename T, typename F>
using conditional_t = typename conditional<B, T, F>::type;

template <typename T>
struct type_identity {
  using type = T;
};

// The builtins leave address spaces alone, so those are peeled off by hand.
#define SIM_REMOVE(name, pattern)            \
  template <typename T>                      \
  struct name##_space {                      \
    using type = T;                          \
  };                                         \
  template <typename T>                      \
  struct name##_space<device pattern> {      \
    using type = pattern;                    \
  };                                         \
  template <typename T>                      \
  struct name##_space<threadgroup pattern> { \
    using type = pattern;                    \
  };
SIM_REMOVE(plain, T)
SIM_REMOVE(readonly, const T)
#undef SIM_REMOVE
template <typename T>
struct readonly_space<constant T> {
  using type = const T;
};

template <typename T>
struct remove_addrspace {
  using type = typename readonly_space<typename plain_space<T>::type>::type;
};
template <typename T>
using remove_addrspace_t = typename remove_addrspace<T>::type;

template <typename T>
using remove_const_t = __remove_const(T);
template <typename T>
using remove_volatile_t = __remove_volatile(T);
template <typename T>
using remove_cv_t = __remove_cv(T);
template <typename T>
using remove_reference_t = __remove_reference_t(T);
template <typename T>
using remove_pointer_t = __remove_pointer(T);
template <typename T>
using remove_cvref_t = remove_cv_t<remove_addrspace_t<remove_reference_t<T>>>;
template <typename T>
using make_signed_t = __make_signed(T);
template <typename T>
using make_unsigned_t = __make_unsigned(T);
template <typename T>
using add_const_t = const T;
template <typename T>
using decay_t = __decay(T);
template <typename T>
using underlying_type_t = __underlying_type(T);

#define SIM_TYPE_OF(name)     \
  template <typename T>       \
  struct name {               \
    using type = name##_t<T>; \
  };
SIM_TYPE_OF(remove_const)
SIM_TYPE_OF(remove_volatile)
SIM_TYPE_OF(remove_cv)
SIM_TYPE_OF(remove_reference)
SIM_TYPE_OF(remove_pointer)
SIM_TYPE_OF(make_signed)
SIM_TYPE_OF(make_unsigned)
SIM_TYPE_OF(decay)
SIM_TYPE_OF(underlying_type)
#undef SIM_TYPE_OF

template <typename T>
remove_reference_t<T>&& declval() noexcept;

// Element type and count of a scalar or vector.
template <typename T>
struct vector_traits {
  using element = T;
  static constexpr int count = 1;
  static constexpr bool is_vector = false;
};
template <typename T, int N>
struct vector_traits<T __attribute__((ext_vector_type(N)))> {
  using element = T;
  static constexpr int count = N;
  static constexpr bool is_vector = true;
};
template <typename T>
using element_t = typename vector_traits<remove_cv_t<T>>::element;
template <typename T>
constexpr int count_v = vector_traits<remove_cv_t<T>>::count;

// name<T>, and its _v form that MSL code mostly uses.
#define SIM_TRAIT(name, ...)                     \
  template <typename T>                          \
  struct name : bool_constant<(__VA_ARGS__)> {}; \
  template <typename T>                          \
  constexpr constant bool name##_v = name<T>::value;
SIM_TRAIT(is_void, __is_void(T))
SIM_TRAIT(is_const, __is_const(T))
SIM_TRAIT(is_volatile, __is_volatile(T))
SIM_TRAIT(is_pointer, __is_pointer(T))
SIM_TRAIT(is_reference, __is_reference(T))
SIM_TRAIT(is_array, __is_array(T))
SIM_TRAIT(is_enum, __is_enum(T))
SIM_TRAIT(is_class, __is_class(T))
SIM_TRAIT(is_union, __is_union(T))
SIM_TRAIT(is_function, __is_function(T))
SIM_TRAIT(is_trivially_copyable, __is_trivially_copyable(T))
SIM_TRAIT(is_vector, vector_traits<remove_cv_t<T>>::is_vector)
SIM_TRAIT(is_scalar, __is_arithmetic(T) || __is_enum(T) || __is_pointer(T))
SIM_TRAIT(is_integral, __is_integral(element_t<T>))
SIM_TRAIT(is_floating_point, __is_floating_point(element_t<T>))
SIM_TRAIT(is_arithmetic, __is_arithmetic(element_t<T>))
SIM_TRAIT(is_signed, __is_signed(element_t<T>))
SIM_TRAIT(is_unsigned, __is_unsigned(element_t<T>))
#undef SIM_TRAIT

#define SIM_RELATION(name, ...)                  \
  template <typename T, typename U>              \
  struct name : bool_constant<(__VA_ARGS__)> {}; \
  template <typename T, typename U>              \
  constexpr constant bool name##_v = name<T, U>::value;
SIM_RELATION(is_same, __is_same(T, U))
SIM_RELATION(is_base_of, __is_base_of(T, U))
// bfloat converts implicitly to and from nothing but float, and to float only.
SIM_RELATION(is_convertible, __is_same(U, bfloat)   ? __is_same(T, bfloat)
                             : __is_same(T, bfloat) ? __is_same(U, float)
                                                    : __is_convertible(T, U))
#undef SIM_RELATION

template <typename T, typename... Args>
struct is_constructible : bool_constant<__is_constructible(T, Args...)> {};

template <typename T, T... I>
struct integer_sequence {
  static constexpr size_t size() { return sizeof...(I); }
};
template <typename T, T N>
using make_integer_sequence = __make_integer_seq<integer_sequence, T, N>;
template <size_t... I>
using index_sequence = integer_sequence<size_t, I...>;
template <size_t N>
using make_index_sequence = make_integer_sequence<size_t, N>;

template <typename... B>
struct conjunction : bool_constant<(bool(B::value) && ...)> {};
template <typename... B>
struct disjunction : bool_constant<(bool(B::value) || ...)> {};
template <typename B>
struct negation : bool_constant<!bool(B::value)> {};
template <typename... B>
using _conjunction = conjunction<B...>;
template <typename... B>
using _disjunction = disjunction<B...>;
template <typename B>
using _negation = negation<B>;

}  // namespace metal
