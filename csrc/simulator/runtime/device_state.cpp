#include "device_state.h"

#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <stdexcept>

namespace sim {
namespace {

constexpr size_t kMaxCounters = 100000;
constexpr size_t kMaxFaults = 64;

bool initial_checks() {
  const char* value = std::getenv("TORCH_FLASH_MPS_SIM_CHECKS");
  return !value || std::strcmp(value, "0") != 0;
}

// 9 of "apple9"; 0 of anything else.
int apple_family(const std::string& name) {
  const std::string prefix = "apple";
  return name.starts_with(prefix) ? std::atoi(name.c_str() + prefix.size()) : 0;
}

bool is_gpu_family(int number) {
  return number >= 7 && number <= 10;
}

int initial_gpu_family() {
  const char* value = std::getenv("TORCH_FLASH_MPS_SIM_GPU");
  const int number = value ? apple_family(value) : 0;
  return is_gpu_family(number) ? number : 7;
}

struct State {
  std::atomic<bool> checks{initial_checks()};
  std::atomic<int> gpu_family{initial_gpu_family()};
  std::atomic<uint64_t> pipelines_built{0}, command_buffers{0}, commits{0}, dispatches{0};
  std::atomic<int64_t> bytes_allocated{0};
  std::atomic<size_t> num_faults{0};

  std::mutex mutex;   // guards what follows
  std::optional<uint64_t> shuffle_seed;
  std::optional<unsigned> gpu_cores = 8;   // of an M1
  std::deque<std::string> faults;
  std::deque<Counters> counters;
};

// Never destroyed: buffers and pipelines of static objects outlive every other static.
State& state() {
  static auto* instance = new State;
  return *instance;
}

}  // namespace

bool checks_enabled() {
  return state().checks.load(std::memory_order_relaxed);
}
void set_checks(bool enabled) {
  state().checks = enabled;
}

std::optional<uint64_t> shuffle_seed() {
  std::lock_guard lock(state().mutex);
  return state().shuffle_seed;
}

void set_shuffle_seed(std::optional<uint64_t> seed) {
  std::lock_guard lock(state().mutex);
  state().shuffle_seed = seed;
}

int gpu_family() {
  return state().gpu_family;
}

void set_gpu_family(const std::string& name) {
  const int number = apple_family(name);
  if (!is_gpu_family(number)) {
    throw std::invalid_argument("GPU family: expected apple7, apple8, apple9 or apple10, found " +
                                name);
  }
  state().gpu_family = number;
}

std::optional<unsigned> gpu_cores() {
  std::lock_guard lock(state().mutex);
  return state().gpu_cores;
}

void set_gpu_cores(std::optional<unsigned> count) {
  std::lock_guard lock(state().mutex);
  state().gpu_cores = count;
}

void report_fault(const std::string& message) {
  std::lock_guard lock(state().mutex);
  auto& faults = state().faults;
  if (faults.size() < kMaxFaults) faults.push_back(message);
  state().num_faults = faults.size();
}

bool has_fault() {
  return state().num_faults.load(std::memory_order_relaxed) != 0;
}

std::optional<std::string> take_fault() {
  if (!has_fault()) return std::nullopt;
  std::lock_guard lock(state().mutex);
  auto& faults = state().faults;
  if (faults.empty()) return std::nullopt;
  std::string first = std::move(faults.front());
  faults.pop_front();
  state().num_faults = faults.size();
  return first;
}

void record_counters(Counters counters) {
  std::lock_guard lock(state().mutex);
  state().counters.push_back(std::move(counters));
  if (state().counters.size() > kMaxCounters) state().counters.pop_front();
}

std::vector<Counters> counters() {
  std::lock_guard lock(state().mutex);
  return {state().counters.begin(), state().counters.end()};
}

void reset_counters() {
  std::lock_guard lock(state().mutex);
  state().counters.clear();
}

Stats stats() {
  const State& s = state();
  return {.pipelines_built = s.pipelines_built,
          .command_buffers = s.command_buffers,
          .commits = s.commits,
          .dispatches = s.dispatches,
          .bytes_allocated = static_cast<uint64_t>(s.bytes_allocated.load())};
}

void count_pipeline() {
  ++state().pipelines_built;
}
void count_command_buffer() {
  ++state().command_buffers;
}
void count_commit() {
  ++state().commits;
}
void count_dispatch() {
  ++state().dispatches;
}
void count_bytes(int64_t difference) {
  state().bytes_allocated += difference;
}

}  // namespace sim
