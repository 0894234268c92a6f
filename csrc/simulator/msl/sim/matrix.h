// metal_simdgroup_matrix. Lane bits b4..b0 hold row 4*b4 + 2*b2 + b1, columns 4*b3 + 2*b0 and the next.
//
// A product only logs its operands: lanes run on without meeting, and the executor evaluates the whole
// log once somebody looks at a result. A matrix is pending while the epoch it was logged in is current.
#pragma once

namespace metal {

template <typename T, int Rows, int Cols>
struct simdgroup_matrix;

namespace matrix_detail {

template <typename T>
constexpr sim::ElementType element_type = is_same_v<T, float>  ? sim::kFloat32
                                          : is_same_v<T, half> ? sim::kFloat16
                                                               : sim::kBFloat16;

SIM_HIDDEN METAL_FUNC uint row_of_lane(uint lane) {
  return (lane >> 4 & 1) * 4 + (lane >> 2 & 1) * 2 + (lane >> 1 & 1);
}
SIM_HIDDEN METAL_FUNC uint column_of_lane(uint lane) {
  return (lane >> 3 & 1) * 4 + (lane & 1) * 2;
}

SIM_HIDDEN inline bool is_current(uint epoch) {
  return epoch == sim::self()->simdgroup->matrix_epoch;
}

// Returns the epoch in which *d is pending.
SIM_HIDDEN inline uint log_product(float a0, float a1, float b0, float b1, void* d,
                                   sim::ElementType type) {
  sim::Thread* me = sim::self();
  sim::Simdgroup* group = me->simdgroup;
  if (me->num_logged == sim::kMatrixLogCapacity) me->services->matrix_flush(me);
  sim::MatrixProduct& product = group->products[me->num_logged++];
  const uint lane = me->lane;
  product.a[lane][0] = a0;
  product.a[lane][1] = a1;
  product.b[lane][0] = b0;
  product.b[lane][1] = b1;
  product.d[lane] = d;
  product.d_type = type;
  return group->matrix_epoch;
}

}  // namespace matrix_detail

template <typename T>
struct simdgroup_matrix<T, 8, 8> {
  using element_type = T;
  using storage_type = vec<T, 2>;

  // Undefined in MSL; NaN shows when it is used.
  simdgroup_matrix() : elements(T(NAN)), epoch(0) {}
  explicit simdgroup_matrix(T diagonal) : epoch(0) {
    const uint lane = sim::self()->lane;
    const uint row = matrix_detail::row_of_lane(lane), col = matrix_detail::column_of_lane(lane);
    elements = storage_type{row == col ? diagonal : T(0), row == col + 1 ? diagonal : T(0)};
  }
  simdgroup_matrix(const simdgroup_matrix& other) : elements(other.settled()), epoch(0) {}
  simdgroup_matrix& operator=(const simdgroup_matrix& other) {
    const storage_type value = other.settled();
    settle();
    elements = value;
    return *this;
  }
  ~simdgroup_matrix() { settle(); }

  storage_type& thread_elements() { return settle(), elements; }
  const storage_type& thread_elements() const { return settled(); }

  const storage_type& settled() const {
    const_cast<simdgroup_matrix*>(this)->settle();
    return elements;
  }
  void settle() {
    if (epoch != 0) {
      if (matrix_detail::is_current(epoch)) sim::matrix_flush();
      epoch = 0;
    }
  }

  storage_type elements;
  uint epoch;  // 0: settled
};

typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <typename T, int Rows, int Cols>
METAL_FUNC simdgroup_matrix<T, Rows, Cols> make_filled_simdgroup_matrix(
    typename type_identity<T>::type value) {
  simdgroup_matrix<T, Rows, Cols> result;
  result.elements = vec<T, 2>(value);
  return result;
}
template <typename T, int Rows, int Cols>
METAL_FUNC simdgroup_matrix<T, Rows, Cols> make_diagonal_simdgroup_matrix(
    typename type_identity<T>::type value) {
  return simdgroup_matrix<T, Rows, Cols>(value);
}

#define SIM_MATRIX_MEMORY(space)                                                                 \
  template <typename T>                                                                          \
  METAL_FUNC void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& d, const space T* src,        \
                                 ulong elements_per_row = 8, ulong2 origin = ulong2(0),          \
                                 bool transpose = false) {                                       \
    const uint lane = sim::self()->lane;                                                         \
    const uint row = matrix_detail::row_of_lane(lane);                                           \
    const uint col = matrix_detail::column_of_lane(lane);                                        \
    src += origin.y * elements_per_row + origin.x;                                               \
    d.settle();                                                                                  \
    if (transpose) {                                                                             \
      d.elements =                                                                               \
          vec<T, 2>{src[col * elements_per_row + row], src[(col + 1) * elements_per_row + row]}; \
    } else {                                                                                     \
      d.elements =                                                                               \
          vec<T, 2>{src[row * elements_per_row + col], src[row * elements_per_row + col + 1]};   \
    }                                                                                            \
  }
#define SIM_MATRIX_STORE(space)                                                            \
  template <typename T>                                                                    \
  METAL_FUNC void simdgroup_store(const thread simdgroup_matrix<T, 8, 8>& a, space T* dst, \
                                  ulong elements_per_row = 8, ulong2 origin = ulong2(0),   \
                                  bool transpose = false) {                                \
    const uint lane = sim::self()->lane;                                                   \
    const uint row = matrix_detail::row_of_lane(lane);                                     \
    const uint col = matrix_detail::column_of_lane(lane);                                  \
    const vec<T, 2> value = a.settled();                                                   \
    dst += origin.y * elements_per_row + origin.x;                                         \
    const ulong row_step = transpose ? 1 : elements_per_row;                               \
    const ulong col_step = transpose ? elements_per_row : 1;                               \
    dst[row * row_step + col * col_step] = value[0];                                       \
    dst[row * row_step + (col + 1) * col_step] = value[1];                                 \
  }
SIM_MATRIX_MEMORY(device)
SIM_MATRIX_MEMORY(threadgroup)
SIM_MATRIX_MEMORY(constant)
SIM_MATRIX_STORE(device)
SIM_MATRIX_STORE(threadgroup)
#undef SIM_MATRIX_MEMORY
#undef SIM_MATRIX_STORE

template <typename D, typename A, typename B, typename C>
METAL_FUNC void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>& d,
                                              const thread simdgroup_matrix<A, 8, 8>& a,
                                              const thread simdgroup_matrix<B, 8, 8>& b,
                                              const thread simdgroup_matrix<C, 8, 8>& c) {
  // Read before d changes: a or b may be the same object.
  const vec<A, 2> left = a.settled();
  const vec<B, 2> right = b.settled();
  if (static_cast<const void*>(&d) != static_cast<const void*>(&c)) {
    const vec<C, 2> start = c.settled();
    d.settle();
    d.elements = vec<D, 2>{static_cast<D>(start[0]), static_cast<D>(start[1])};
  }
  d.epoch = matrix_detail::log_product(left[0], left[1], right[0], right[1], &d.elements,
                                       matrix_detail::element_type<D>);
}

template <typename D, typename A, typename B>
METAL_FUNC void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>& d,
                                   const thread simdgroup_matrix<A, 8, 8>& a,
                                   const thread simdgroup_matrix<B, 8, 8>& b) {
  const simdgroup_matrix<D, 8, 8> zero = make_filled_simdgroup_matrix<D, 8, 8>(D(0));
  simdgroup_multiply_accumulate(d, a, b, zero);
}

template <typename A, typename B>
METAL_FUNC simdgroup_matrix<A, 8, 8> operator*(const thread simdgroup_matrix<A, 8, 8>& a,
                                               const thread simdgroup_matrix<B, 8, 8>& b) {
  simdgroup_matrix<A, 8, 8> result;
  simdgroup_multiply(result, a, b);
  result.settle();
  return result;
}

}  // namespace metal
