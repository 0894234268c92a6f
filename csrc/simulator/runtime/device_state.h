// State of the one simulated GPU of this process: switches, statistics, faults.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "compiler.h"
#include "executor.h"

namespace sim {

struct Stats {
  uint64_t pipelines_built = 0;
  uint64_t command_buffers = 0;
  uint64_t commits = 0;
  uint64_t dispatches = 0;
  uint64_t bytes_allocated = 0;   // in live MTLBuffers
};

// Checked mode: kernels are instrumented, memory is poisoned. Starts as the environment variable
// TORCH_FLASH_MPS_SIM_CHECKS says (0: off), on when it is not set.
bool checks_enabled();
void set_checks(bool enabled);
inline Flavour current_flavour() {
  return checks_enabled() ? Flavour::Instrumented : Flavour::Plain;
}

// Seed for the order of threads, threadgroups and unordered dispatches; unset: ascending.
std::optional<uint64_t> shuffle_seed();
void set_shuffle_seed(std::optional<uint64_t> seed);

// N of the newest MTLGPUFamilyAppleN that supportsFamily: affirms. Starts as the environment variable
// TORCH_FLASH_MPS_SIM_GPU says, at 7 when that is not set.
int gpu_family();
// apple7 ... apple10; throws std::invalid_argument for another name.
void set_gpu_family(const std::string& name);

// Cores of the GPU; unset: the registry of devices cannot be read.
std::optional<unsigned> gpu_cores();
void set_gpu_cores(std::optional<unsigned> count);

// Remembers what went wrong until somebody can raise it; the process goes on.
void report_fault(const std::string& message);
// The first fault that nobody has taken yet.
std::optional<std::string> take_fault();
bool has_fault();

// Counters of each dispatch in the order in which they ran; the oldest are dropped beyond 100,000.
void record_counters(Counters counters);
std::vector<Counters> counters();
void reset_counters();

Stats stats();
void count_pipeline();
void count_command_buffer();
void count_commit();
void count_dispatch();
void count_bytes(int64_t difference);

}  // namespace sim
