// What threads compute together, whatever the order they run in and the number of workers; and what
// the counters say about it.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "hand_written.h"

namespace {

int num_failures = 0;

void expect(bool is_right, const char* what, uint64_t got, uint64_t expected) {
  if (is_right) return;
  ++num_failures;
  std::printf("FAILED %s: expected %llu, got %llu\n", what,
              static_cast<unsigned long long>(expected), static_cast<unsigned long long>(got));
}

void expect_equal(const char* what, uint64_t got, uint64_t expected) {
  expect(got == expected, what, got, expected);
}

std::vector<ExecutorOptions> all_orders() {
  std::vector<ExecutorOptions> orders;
  for (uint32_t workers : {1u, 3u}) {
    orders.push_back({.shuffle_seed = {}, .num_workers = workers});
    for (uint64_t seed = 0; seed < 8; ++seed) {
      orders.push_back({.shuffle_seed = seed, .num_workers = workers});
    }
  }
  return orders;
}

// out[i]: the sum of the positions of a simdgroup, fetched from the mirrored thread.
void sum_and_mirror(const Launch* launch) {
  const Context c(launch);
  LaneValue mine{};
  const uint32_t position = c.grid_index();
  std::memcpy(mine.bytes, &position, sizeof position);
  const LaneValue* all = c.exchange(mine);
  c.exchange();  // the first values stay valid through the next exchange
  float sum = 0;
  uint32_t num_absent = 0;
  for (uint32_t lane = 0; lane < kSimdWidth; ++lane) {
    uint32_t value;
    std::memcpy(&value, all[lane].bytes, sizeof value);
    if (value == ~0u)
      ++num_absent;
    else
      sum += float(value);
  }
  if (num_absent != kSimdWidth - c.thread->simdgroup->num_lanes) sum = -1;
  float* shared = c.shared(kMaxThreadsPerThreadgroup);
  store(shared + c.index, sum);
  c.barrier();
  store(c.out + position, load(shared + c.thread->threads_per_threadgroup[0] - 1 - c.index));
}

void check_sums() {
  for (uint32_t size : {1u, 31u, 33u, 100u, 1000u, 1024u}) {
    const uint32_t grid = 3 * size - size / 2;  // the last threadgroup is smaller
    std::vector<float> expected(grid);
    for (uint32_t i = 0; i < grid; ++i) {
      const uint32_t first = i / size * size;
      const uint32_t count = std::min(size, grid - first);
      const uint32_t mirror = count - 1 - (i - first);
      const uint32_t begin = mirror / kSimdWidth * kSimdWidth;
      const uint32_t end = std::min(begin + kSimdWidth, count);
      for (uint32_t k = begin; k < end; ++k) expected[i] += float(first + k);
    }
    for (const ExecutorOptions& order : all_orders()) {
      std::vector<float> out(grid, -2);
      Dispatch dispatch = make_dispatch("sum_and_mirror", sum_and_mirror, grid, size);
      dispatch.buffers[kOut] = {out.data(), 4 * out.size(), 0, ""};
      const Outcome outcome = execute(dispatch, order);
      if (outcome.fault) std::printf("%s\n", outcome.fault->message.c_str());
      expect_equal("sum_and_mirror: wrong sums", !outcome.fault && out == expected, true);
    }
  }
}

// Element (row, column) of an 8x8 matrix lives in this lane, at this place of its pair.
uint32_t lane_of(uint32_t row, uint32_t column) {
  return (row & 4) << 2 | (column & 4) << 1 | (row & 2) << 1 | (row & 1) << 1 | (column & 2) >> 1;
}

// Sums of their products are exact in float32, but not in the narrow types.
float a_of(uint32_t row, uint32_t column) {
  return float(row) + 0x1p-7f * float(column);
}
float b_of(uint32_t row, uint32_t column) {
  return float(row * column % 5) - 1 + 0x1p-6f;
}

ElementType d_type;

// out = A B + A B, and a second product of twice the size, interleaved.
void multiply(const Launch* launch) {
  const Context c(launch);
  Thread& t = *c.thread;
  alignas(4) unsigned char sums[2][8] = {};
  for (uint32_t i = 0; i < 4; ++i) {
    MatrixProduct& product = t.simdgroup->products[t.num_logged++];
    for (uint32_t row = 0; row < 8; ++row) {
      for (uint32_t column = 0; column < 8; ++column) {
        if (lane_of(row, column) != t.lane) continue;
        product.a[t.lane][column % 2] = a_of(row, column) * float(1 + i % 2);
        product.b[t.lane][column % 2] = b_of(row, column);
      }
    }
    product.d[t.lane] = sums[i % 2];
    product.d_type = d_type;
  }
  c.services->matrix_flush(c.thread);
  std::memcpy(c.out + 4 * t.lane, sums, sizeof sums);
}

// The bits of `value` rounded to nearest even at a given number of fraction bits.
float rounded(float value, int fraction_bits) {
  int exponent;
  const float mantissa = std::frexp(value, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(mantissa, fraction_bits + 1)),
                    exponent - fraction_bits - 1);
}

float element(const unsigned char* pair, uint32_t index) {
  if (d_type == kFloat32) {
    float value;
    std::memcpy(&value, pair + 4 * index, sizeof value);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, pair + 2 * index, sizeof bits);
  if (d_type == kFloat16) {
    _Float16 value;
    std::memcpy(&value, &bits, sizeof value);
    return float(value);
  }
  const uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

void check_matrices() {
  for (ElementType type : {kFloat32, kFloat16, kBFloat16}) {
    d_type = type;
    const int fraction_bits = type == kFloat32 ? 23 : type == kFloat16 ? 10 : 7;
    std::vector<unsigned char> out(16 * kSimdWidth);
    Dispatch dispatch = make_dispatch("multiply", multiply, kSimdWidth, kSimdWidth);
    dispatch.buffers[kOut] = {out.data(), out.size(), 0, ""};
    const Outcome outcome = execute(dispatch, {});
    expect_equal("multiply: products", outcome.counters.matrix_products, 4);
    for (uint32_t row = 0; row < 8; ++row) {
      for (uint32_t column = 0; column < 8; ++column) {
        float product = 0;
        for (uint32_t k = 0; k < 8; ++k) product += a_of(row, k) * b_of(k, column);
        for (uint32_t i = 0; i < 2; ++i) {
          const float once = rounded(product * float(1 + i), fraction_bits);
          const float expected = rounded(once + product * float(1 + i), fraction_bits);
          const float got = element(&out[16 * lane_of(row, column) + 8 * i], column % 2);
          expect(got == expected, "multiply: element in thousandths", uint64_t(1000 * got),
                 uint64_t(1000 * expected));
        }
      }
    }
  }
}

// Each thread reads two neighbours that it shares with the next thread, and writes one element.
void traffic(const Launch* launch) {
  const Context c(launch);
  const float sum = load(c.in + c.grid_index()) + load(c.in + c.grid_index() + 1);
  float* shared = c.shared();
  store(shared + c.index, sum);
  c.services->simdgroup_barrier(c.thread, kMemThreadgroup, 0);
  store(c.out + 2 * c.grid_index(), load(shared + c.index));
  ++c.thread->counters.exponentials;
}

void check_counters() {
  constexpr uint32_t kGroups = 3, kGrid = kGroups * kThreads;
  std::vector<float> in(kGrid + 1), out(2 * kGrid);
  for (const ExecutorOptions& order : all_orders()) {
    Dispatch dispatch = make_dispatch("traffic", traffic, kGrid, kThreads);
    dispatch.buffers[kIn] = {in.data(), 4 * in.size(), 0, ""};
    dispatch.buffers[kOut] = {out.data(), 4 * out.size(), 0, ""};
    const Outcome outcome = execute(dispatch, order);
    const Counters& n = outcome.counters;
    expect_equal("threadgroups", n.threadgroups, kGroups);
    expect_equal("exponentials", n.exponentials, kGrid);
    expect_equal("simdgroup barriers", n.simdgroup_barriers, kGrid / kSimdWidth);
    expect_equal("device bytes read", n.device_bytes_read, 8 * kGrid);
    expect_equal("distinct", n.device_bytes_read_distinct, kGroups * 4 * (kThreads + 1));
    expect_equal("footprint", n.device_bytes_footprint, 4 * in.size() + 4 * kGrid);
    expect_equal("device bytes written", n.device_bytes_written, 4 * kGrid);
    expect_equal("threadgroup bytes read", n.threadgroup_bytes_read, 4 * kGrid);
    expect_equal("threadgroup bytes written", n.threadgroup_bytes_written, 4 * kGrid);
    const auto begin = reinterpret_cast<uintptr_t>(in.data());
    const Footprint& footprint = outcome.footprint;
    expect_equal("ranges read", footprint.read.size(), 1);
    for (const auto& [first, last] : footprint.read) {
      expect_equal("begin of the range", first, begin);
      expect_equal("end of the range", last, begin + 4 * in.size());
    }
    expect_equal("ranges written", footprint.written.size(), kGrid);
  }
}

void check_refusals() {
  const auto message_of = [](const Dispatch& dispatch) {
    const Outcome outcome = execute(dispatch, {});
    return outcome.fault ? outcome.fault->message : std::string();
  };
  const auto expect_words = [&](const Dispatch& dispatch, const char* words) {
    const std::string message = message_of(dispatch);
    if (message.find(words) != std::string::npos) return;
    ++num_failures;
    std::printf("FAILED: expected '%s', got '%s'\n", words, message.c_str());
  };
  expect_words(make_dispatch("k", traffic, 1056, 1056), "has 1056 threads; the most");
  expect_words(make_dispatch("k", traffic, 128, 128, 64), "the most for this kernel is 64");
  Dispatch dispatch = make_dispatch("k", [](const Launch*) {}, 64, 64);
  dispatch.threadgroup_bytes[0] = kMaxThreadgroupBytes - 16;
  dispatch.threadgroup_bytes[1] = 16;
  expect_equal("32 KB are allowed", message_of(dispatch).empty(), true);
  dispatch.threadgroup_bytes[1] = 32;
  expect_words(dispatch, "asks for 32784 bytes of threadgroup memory");
}

}  // namespace

int check_faults();

int main() {
  check_sums();
  check_matrices();
  check_counters();
  check_refusals();
  std::printf("results: %d failures\n", num_failures);
  return check_faults() + num_failures != 0;
}
