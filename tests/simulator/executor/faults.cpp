// Each fault must be reported in these words, and its twin without the fault must stay silent.
#include <cstdio>
#include <cstring>

#include "hand_written.h"

namespace {

bool has_fault;  // the kernels below are clean when false

void read_outside(const Launch* launch) {
  const Context c(launch);
  if (c.index == 37) load(c.in + kElements - 1 + has_fault);
}

void read_before_offset(const Launch* launch) {
  const Context c(launch);
  load(c.in - (has_fault && c.index == 1));
}

void write_across_end(const Launch* launch) {
  const Context c(launch);
  if (c.index != 0 || !c.in_group(0)) return;
  auto* end = reinterpret_cast<double*>(c.out + kElements) - 1;
  store(reinterpret_cast<double*>(reinterpret_cast<char*>(end) + (has_fault ? 4 : 0)), 1.0);
}

void read_unbound(const Launch* launch) {
  const Context c(launch);
  if (has_fault) load(c.mask + c.index);
}

void race_shared(const Launch* launch) {
  const Context c(launch);
  float* shared = c.shared();
  store(shared + c.index, 1.0f);
  if (!has_fault) c.barrier();
  load(shared + (c.index + 1) % kThreads);
}

void race_shared_write_after_read(const Launch* launch) {
  const Context c(launch);
  float* shared = c.shared();
  if (c.index == 0) store(shared, 1.0f);
  c.barrier();
  load(shared);
  c.barrier(has_fault ? kMemDevice : kMemThreadgroup);
  if (c.index == 40) store(shared, 2.0f);
}

void race_shared_between_simdgroups(const Launch* launch) {
  const Context c(launch);
  float* shared = c.shared();
  store(shared + c.index, 1.0f);
  c.services->simdgroup_barrier(c.thread, kMemThreadgroup, 0);
  const bool is_second = c.index >= kSimdWidth;
  load(shared + (has_fault && is_second ? c.index - kSimdWidth : c.index ^ 1));
}

void exchange_orders_no_memory(const Launch* launch) {
  const Context c(launch);
  float* shared = c.shared();
  store(shared + c.index, 1.0f);
  c.exchange();
  load(shared + (has_fault ? c.index ^ 1 : c.index));
}

void race_halves(const Launch* launch) {
  const Context c(launch);
  auto* shared = reinterpret_cast<uint16_t*>(c.shared());
  store(shared + (has_fault ? c.index / 2 : c.index), uint16_t(1));
}

void race_device(const Launch* launch) {
  const Context c(launch);
  if (!c.in_group(0)) return;
  store(c.out + c.index, 1.0f);
  c.barrier(has_fault ? kMemThreadgroup : kMemDevice);
  load(c.out + (c.index + 1) % kThreads);
}

void race_threadgroups(const Launch* launch) {
  const Context c(launch);
  const uint32_t place = has_fault ? c.index : c.thread->thread_position_in_grid[0];
  store(c.out + place, 1.0f);
}

void race_threadgroups_read(const Launch* launch) {
  const Context c(launch);
  load(c.out);
  c.barrier(kMemDevice);
  if (has_fault && c.in_group(1) && c.index == 5) store(c.out, 1.0f);
}

void race_atomic(const Launch* launch) {
  const Context c(launch);
  c.services->atomic_access(c.thread, c.out, 4);
  if (has_fault && c.index == 3) store(c.out, 1.0f);
}

void read_never_written(const Launch* launch) {
  const Context c(launch);
  float* shared = c.shared();
  if (!has_fault || c.index != 9) store(shared + c.index, 1.0f);
  c.barrier();
  load(shared + c.index);
}

void shared_outside(const Launch* launch) {
  const Context c(launch);
  float* shared = c.shared();
  c.shared(kThreads, 1);
  store(shared + c.index + has_fault, 1.0f);
}

void too_much_shared(const Launch* launch) {
  const Context c(launch);
  c.shared(kMaxThreadgroupBytes / 8);
  c.shared(kMaxThreadgroupBytes / 8 + has_fault, 1);
}

void barrier_not_reached(const Launch* launch) {
  const Context c(launch);
  if (!has_fault || c.index < 40) c.barrier();
}

void barrier_skipped_by_simdgroup(const Launch* launch) {
  const Context c(launch);
  if (!has_fault || c.index >= 32) c.barrier();
}

void shuffle_not_reached(const Launch* launch) {
  const Context c(launch);
  if (has_fault && c.index == 7) return;
  c.exchange();
}

void different_waits(const Launch* launch) {
  const Context c(launch);
  if (has_fault && c.index == 3) {
    c.services->simdgroup_barrier(c.thread, kMemNone, 0);
  } else {
    c.barrier();
  }
}

void two_barriers(const Launch* launch) {
  const Context c(launch);
  const bool is_second = has_fault && c.index >= kSimdWidth;
  c.barrier(kMemThreadgroup, site_of(is_second ? 14 : 12, 3));
}

void two_shuffles(const Launch* launch) {
  const Context c(launch);
  c.exchange({}, site_of(7, has_fault && c.index == 4 ? 40 : 9));
}

void unequal_matrices(const Launch* launch) {
  const Context c(launch);
  float d[2] = {};
  MatrixProduct& product = c.thread->simdgroup->products[0];
  std::memset(product.a[c.thread->lane], 0, 8);
  std::memset(product.b[c.thread->lane], 0, 8);
  product.d[c.thread->lane] = d;
  product.d_type = kFloat32;
  c.thread->num_logged = has_fault && c.index == 33 ? 0 : 1;
  c.services->matrix_flush(c.thread);
}

void own_fault(const Launch* launch) {
  const Context c(launch);
  if (has_fault && c.index == 2) c.services->fault(c.thread, "slot 2 'mask' is not bound");
}

void wild_access(const Launch* launch) {
  const Context c(launch);
  if (has_fault && c.index == 6) *reinterpret_cast<volatile float*>(uintptr_t(1) << 45) = 1.0f;
}

void bad_pointer(const Launch* launch) {
  const Context c(launch);
  if (has_fault) (void)*reinterpret_cast<volatile float*>(uintptr_t(0xA5A5) << 48);
  (void)c;
}

void null_access(const Launch* launch) {
  const Context c(launch);
  if (has_fault) (void)*const_cast<volatile float*>(c.mask + 4);
}

__attribute__((noinline)) uint32_t recurse(uint32_t depth) {
  volatile char frame[1024];
  frame[depth % 1024] = 1;
  return depth == 0 ? frame[0] : recurse(depth - 1) + frame[1];
}

void stack_overflow(const Launch*) {
  recurse(has_fault ? 100000 : 50);
}

void divide_by_zero(const Launch* launch) {
  volatile int zero = has_fault ? 0 : 1;
  volatile int result = int(reinterpret_cast<uintptr_t>(launch) & 0xFF) / zero;
  (void)result;
}

struct Case {
  const char* name;
  KernelEntry entry;
  std::vector<const char*> words;  // of the message, in this order
};

const Case kCases[] = {
    {"read_outside",
     read_outside,
     {"thread (37, 0, 0)", "reads 4 bytes at byte offset 1024 of slot 0 'in' (1024 bytes)"}},
    {"read_before_offset",
     read_before_offset,
     {"thread (1, 0, 0)", "reads 4 bytes at byte offset -4 of slot 0 'in'"}},
    {"write_across_end", write_across_end, {"writes 8 bytes at byte offset 1020 of slot 1 'out'"}},
    {"read_unbound", read_unbound, {"reads 4 bytes at null + 0: slot 2 'mask' is not bound"}},
    {"race_shared",
     race_shared,
     {"lane 0) reads 4 bytes at byte offset 4 of", "'shared'", "no thread has written so far"}},
    {"race_shared_write_after_read",
     race_shared_write_after_read,
     {"simdgroup 1, lane 8) writes", "more than one simdgroup has read"}},
    {"race_shared_between_simdgroups",
     race_shared_between_simdgroups,
     {"simdgroup 1, lane 31) reads", "simdgroup 0, lane 31) has written"}},
    {"exchange_orders_no_memory", exchange_orders_no_memory, {"reads 4 bytes", "has written"}},
    {"race_halves", race_halves, {"lane 1) writes 2 bytes", "lane 0) has written"}},
    {"race_device",
     race_device,
     {"lane 31) reads 4 bytes at byte offset 0 of slot 1 'out'", "lane 0) has written without"}},
    {"race_threadgroups",
     race_threadgroups,
     {"writes 4 bytes", "threadgroups of one dispatch are not ordered"}},
    {"race_threadgroups_read",
     race_threadgroups_read,
     {"lane 5) writes 4 bytes at byte offset 0 of slot 1", "more than one threadgroup has read"}},
    {"race_atomic", race_atomic, {"writes 4 bytes", "an atomic operation has written"}},
    {"read_never_written",
     read_never_written,
     {"lane 9) reads 4 bytes at byte offset 36 of", "'shared'", "no thread has written"}},
    {"shared_outside", shared_outside, {"lane 31) writes", "byte offset 256", "outside the array"}},
    {"too_much_shared", too_much_shared, {"needs 32772 bytes of threadgroup memory", "'more'"}},
    {"barrier_not_reached",
     barrier_not_reached,
     {"waits at threadgroup_barrier", "thread (40, 0, 0)", "has returned without reaching it"}},
    {"barrier_skipped_by_simdgroup",
     barrier_skipped_by_simdgroup,
     {"simdgroup 1, lane 31) waits at threadgroup_barrier", "simdgroup 0, lane 0) has returned"}},
    {"shuffle_not_reached", shuffle_not_reached, {"lane 7) has returned without reaching it"}},
    {"different_waits",
     different_waits,
     {"lane 0) waits at threadgroup_barrier", "lane 3) waits at simdgroup_barrier"}},
    {"two_barriers",
     two_barriers,
     {"simdgroup 0, lane 0) waits at threadgroup_barrier (line 12)",
      "simdgroup 1, lane 31) waits at another one (line 14)"}},
    {"two_shuffles", two_shuffles, {"shuffle, reduction or vote", "lane 4) waits at another one"}},
    {"unequal_matrices",
     unequal_matrices,
     {"lane 31) has multiplied 1 simdgroup", "lane 1) has multiplied 0"}},
    {"own_fault", own_fault, {"thread (2, 0, 0)", "slot 2 'mask' is not bound"}},
    {"wild_access", wild_access, {"thread (6, 0, 0)", "writes address 0x200000000000"}},
    {"bad_pointer", bad_pointer, {"uses a pointer that is no address"}},
    {"null_access", null_access, {"reads null + 16: slot 2 'mask' is not bound"}},
    {"stack_overflow", stack_overflow, {"needs more than its 128 KB of stack"}},
    {"divide_by_zero", divide_by_zero, {"divides an integer by zero"}},
};

std::string message_of(const Case& c, ExecutorOptions options) {
  constexpr uint64_t kOffset = 64;
  std::vector<float> in(kOffset / 4 + kElements), out(kElements);
  Dispatch dispatch = make_dispatch(c.name, c.entry, 4 * kThreads, kThreads);
  dispatch.buffers[kIn] = {in.data(), 4 * in.size(), kOffset, ""};
  dispatch.buffers[kOut] = {out.data(), 4 * out.size(), 0, ""};
  const Outcome outcome = execute(dispatch, options);
  return outcome.fault ? outcome.fault->message : "";
}

bool holds(const std::string& message, const std::vector<const char*>& words) {
  size_t place = 0;
  for (const char* word : words) {
    place = message.find(word, place);
    if (place == std::string::npos) return false;
  }
  return true;
}

}  // namespace

int check_faults() {
  int num_bad = 0;
  const auto expect = [&](bool is_right, const Case& c, const std::string& message) {
    num_bad += !is_right;
    if (!is_right) std::printf("FAILED %s: '%s'\n", c.name, message.c_str());
  };
  for (const Case& c : kCases) {
    for (uint32_t workers : {1u, 4u}) {
      has_fault = true;
      const std::string message = message_of(c, {.shuffle_seed = {}, .num_workers = workers});
      std::vector<const char*> words = c.words;
      if (workers > 1) words = {c.name, "thread"};
      expect(holds(message, words), c, message);
      if (workers == 1) std::printf("%s\n", message.c_str());
      for (uint64_t seed = 0; seed < 20; ++seed) {
        has_fault = true;
        const std::string shuffled = message_of(c, {.shuffle_seed = seed, .num_workers = workers});
        expect(!shuffled.empty(), c, "shuffled: no fault");
        has_fault = false;
        const std::string clean = message_of(c, {.shuffle_seed = seed, .num_workers = workers});
        expect(clean.empty(), c, clean);
      }
    }
  }
  std::printf("%zu cases, %d failures\n", std::size(kCases), num_bad);
  return num_bad;
}
