// metal_simdgroup and metal_quadgroup: everything is built on one exchange of 16 bytes per lane.
#pragma once

namespace metal {

// A copy of another lane's value. A lane outside the simdgroup reads as 0xFF bytes: MSL leaves it
// undefined, and a NaN or a huge integer shows.
template <typename T>
SIM_HIDDEN inline T value_from_lane(T mine, uint lane, sim::Site site) {
  constexpr int parts = (sizeof(T) + 15) / 16;
  union Bytes {
    unsigned char raw[parts * 16];
    T value;
    Bytes() {}
  };
  Bytes in, out;
  in.value = mine;
  sim::Thread* me = sim::self();
  for (int part = 0; part < parts; ++part) {
    sim::LaneValue chunk;
    __builtin_memcpy(chunk.bytes, in.raw + part * 16, 16);
    const sim::LaneValue* all = me->services->exchange(me, &chunk, site);
    if (lane < sim::kSimdWidth) {
      __builtin_memcpy(out.raw + part * 16, all[lane].bytes, 16);
    } else {
      __builtin_memset(out.raw + part * 16, 0xFF, 16);
    }
  }
  return out.value;
}

template <typename T>
METAL_FUNC T simd_shuffle(T data, ushort lane, sim::Site site = SIM_HERE) {
  return value_from_lane(data, lane, site);
}
template <typename T>
METAL_FUNC T simd_broadcast(T data, ushort lane, sim::Site site = SIM_HERE) {
  return value_from_lane(data, lane, site);
}
template <typename T>
METAL_FUNC T simd_broadcast_first(T data, sim::Site site = SIM_HERE) {
  return value_from_lane(data, 0, site);
}
template <typename T>
METAL_FUNC T simd_shuffle_xor(T data, ushort mask, sim::Site site = SIM_HERE) {
  return value_from_lane(data, sim::self()->lane ^ mask, site);
}
// The lanes that have no source keep what they had, as on Apple's GPUs.
template <typename T>
METAL_FUNC T simd_shuffle_up(T data, ushort delta, sim::Site site = SIM_HERE) {
  const uint lane = sim::self()->lane;
  return value_from_lane(data, lane >= delta ? lane - delta : lane, site);
}
template <typename T>
METAL_FUNC T simd_shuffle_down(T data, ushort delta, sim::Site site = SIM_HERE) {
  const uint lane = sim::self()->lane;
  return value_from_lane(data, lane + delta < sim::kSimdWidth ? lane + delta : lane, site);
}
template <typename T>
METAL_FUNC T simd_shuffle_rotate_up(T data, ushort delta, sim::Site site = SIM_HERE) {
  return value_from_lane(data, (sim::self()->lane - delta) % sim::kSimdWidth, site);
}
template <typename T>
METAL_FUNC T simd_shuffle_rotate_down(T data, ushort delta, sim::Site site = SIM_HERE) {
  return value_from_lane(data, (sim::self()->lane + delta) % sim::kSimdWidth, site);
}
// Within groups of `modulo` lanes; the filling stands before (up) or after (down) each group.
template <typename T>
METAL_FUNC T simd_shuffle_and_fill_up(T data, T filling, ushort delta, ushort modulo = 32,
                                      sim::Site site = SIM_HERE) {
  const uint lane = sim::self()->lane, base = lane / modulo * modulo, place = lane % modulo;
  const bool inside = place >= delta;
  const T other = value_from_lane(data, inside ? lane - delta : lane, site);
  const T fill =
      value_from_lane(filling, inside ? lane : base + (place + modulo - delta) % modulo, site);
  return inside ? other : fill;
}
template <typename T>
METAL_FUNC T simd_shuffle_and_fill_down(T data, T filling, ushort delta, ushort modulo = 32,
                                        sim::Site site = SIM_HERE) {
  const uint lane = sim::self()->lane, base = lane / modulo * modulo, place = lane % modulo;
  const bool inside = place + delta < modulo;
  const T other = value_from_lane(data, inside ? lane + delta : lane, site);
  const T fill = value_from_lane(filling, inside ? lane : base + (place + delta) % modulo, site);
  return inside ? other : fill;
}

// Folds the lanes first, first + 1, ... last in ascending order.
template <typename T, typename Op>
SIM_HIDDEN inline T fold_lanes(T mine, uint first, uint last, Op op, sim::Site site) {
  static_assert(sizeof(T) <= 16, "simdgroup reduction: the type is larger than 16 bytes");
  sim::Thread* me = sim::self();
  sim::LaneValue in;
  __builtin_memcpy(in.bytes, &mine, sizeof(T));
  const sim::LaneValue* all = me->services->exchange(me, &in, site);
  T total;
  __builtin_memcpy(&total, all[first].bytes, sizeof(T));
  for (uint lane = first + 1; lane <= last; ++lane) {
    T next;
    __builtin_memcpy(&next, all[lane].bytes, sizeof(T));
    total = op(total, next);
  }
  return total;
}

// A butterfly, the order that a GPU adds in; lanes that do not exist are left out.
template <typename T, typename Op>
SIM_HIDDEN inline T reduce_lanes(T mine, uint first, uint count, Op op, sim::Site site) {
  static_assert(sizeof(T) <= 16, "simdgroup reduction: the type is larger than 16 bytes");
  sim::Thread* me = sim::self();
  sim::LaneValue in;
  __builtin_memcpy(in.bytes, &mine, sizeof(T));
  const sim::LaneValue* all = me->services->exchange(me, &in, site);
  T values[sim::kSimdWidth];
  for (uint i = 0; i < count; ++i) __builtin_memcpy(&values[i], all[first + i].bytes, sizeof(T));
  for (uint step = 1; step < count; step *= 2) {
    for (uint i = 0; i + step < count; i += 2 * step) values[i] = op(values[i], values[i + step]);
  }
  return values[0];
}

struct SumOf {
  template <typename T>
  T operator()(T a, T b) const {
    return a + b;
  }
};
struct ProductOf {
  template <typename T>
  T operator()(T a, T b) const {
    return a * b;
  }
};
struct MaxOf {
  template <typename T>
  T operator()(T a, T b) const {
    return max(a, b);
  }
};
struct MinOf {
  template <typename T>
  T operator()(T a, T b) const {
    return min(a, b);
  }
};
struct AndOf {
  template <typename T>
  T operator()(T a, T b) const {
    return a & b;
  }
};
struct OrOf {
  template <typename T>
  T operator()(T a, T b) const {
    return a | b;
  }
};
struct XorOf {
  template <typename T>
  T operator()(T a, T b) const {
    return a ^ b;
  }
};

SIM_HIDDEN inline uint lanes_of_simdgroup() {
  return sim::self()->simdgroup->num_lanes;
}

#define SIM_REDUCTION(name, Op)                                        \
  template <typename T>                                                \
  METAL_FUNC T simd_##name(T data, sim::Site site = SIM_HERE) {        \
    return reduce_lanes(data, 0, lanes_of_simdgroup(), Op{}, site);    \
  }                                                                    \
  template <typename T>                                                \
  METAL_FUNC T quad_##name(T data, sim::Site site = SIM_HERE) {        \
    return reduce_lanes(data, sim::self()->lane & ~3u, 4, Op{}, site); \
  }
SIM_REDUCTION(sum, SumOf)
SIM_REDUCTION(product, ProductOf)
SIM_REDUCTION(max, MaxOf)
SIM_REDUCTION(min, MinOf)
SIM_REDUCTION(and, AndOf)
SIM_REDUCTION(or, OrOf)
SIM_REDUCTION(xor, XorOf)
#undef SIM_REDUCTION

#define SIM_PREFIX(name, Op, neutral)                                            \
  template <typename T>                                                          \
  METAL_FUNC T simd_prefix_inclusive_##name(T data, sim::Site site = SIM_HERE) { \
    return fold_lanes(data, 0, sim::self()->lane, Op{}, site);                   \
  }                                                                              \
  template <typename T>                                                          \
  METAL_FUNC T simd_prefix_exclusive_##name(T data, sim::Site site = SIM_HERE) { \
    const uint lane = sim::self()->lane;                                         \
    const T before = fold_lanes(data, 0, lane == 0 ? 0 : lane - 1, Op{}, site);  \
    return lane == 0 ? T(neutral) : before;                                      \
  }
SIM_PREFIX(sum, SumOf, 0)
SIM_PREFIX(product, ProductOf, 1)
#undef SIM_PREFIX

struct simd_vote {
  using vote_t = uint64_t;
  vote_t bits;
  explicit constexpr simd_vote(vote_t v = 0) : bits(v) {}
  explicit constexpr operator vote_t() const { return bits; }
  SIM_HIDDEN bool all() const {
    return bits == (lanes_of_simdgroup() == 32 ? 0xFFFFFFFFu : (1u << lanes_of_simdgroup()) - 1);
  }
  bool any() const { return bits != 0; }
};

SIM_HIDDEN inline simd_vote simd_ballot(bool predicate, sim::Site site = SIM_HERE) {
  const uint bit = predicate ? 1u << sim::self()->lane : 0u;
  return simd_vote(simd_or(bit, site));
}
inline bool simd_all(bool predicate, sim::Site site = SIM_HERE) {
  return simd_ballot(predicate, site).all();
}
inline bool simd_any(bool predicate, sim::Site site = SIM_HERE) {
  return simd_ballot(predicate, site).any();
}
inline simd_vote simd_active_threads_mask(sim::Site site = SIM_HERE) {
  return simd_ballot(true, site);
}
inline bool simd_is_first() {
  return sim::self()->lane == 0;
}
inline bool simd_is_helper_thread() {
  return false;
}

template <typename T>
METAL_FUNC T quad_shuffle(T data, ushort lane, sim::Site site = SIM_HERE) {
  return value_from_lane(data, (sim::self()->lane & ~3u) + lane % 4, site);
}
template <typename T>
METAL_FUNC T quad_broadcast(T data, ushort lane, sim::Site site = SIM_HERE) {
  return quad_shuffle(data, lane, site);
}
template <typename T>
METAL_FUNC T quad_shuffle_xor(T data, ushort mask, sim::Site site = SIM_HERE) {
  return value_from_lane(data, sim::self()->lane ^ (mask % 4), site);
}

}  // namespace metal
