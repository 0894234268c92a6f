#include "list_runner.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <stdexcept>

#include "device_state.h"
#include "hazards.h"

namespace sim {
namespace {

double seconds_now() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

struct RunFault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void check_alive(const Location& location, const std::string& user) {
  if (!location.storage->is_retired()) return;
  throw RunFault(user + ": the MTLBuffer '" + location.storage->label +
                 "' was deallocated before the work that uses it ran");
}

class PassRunner {
 public:
  explicit PassRunner(const Pass& pass) : pass_(pass) {}

  void run() {
    for (const Command* command : ordered()) {
      std::visit([this](const auto& each) { run(each); }, *command);
    }
  }

 private:
  // Between two barriers of a concurrent pass any order is right, so a seed may choose it.
  std::vector<const Command*> ordered() const {
    std::vector<const Command*> order;
    for (const auto& command : pass_.commands) order.push_back(&command);
    const auto seed = shuffle_seed();
    if (!pass_.is_concurrent || !seed) return order;
    std::mt19937_64 random(*seed);
    auto is_barrier = [](const Command* one) {
      return std::holds_alternative<BarrierCommand>(*one);
    };
    for (auto begin = order.begin(); begin != order.end();) {
      auto end = std::find_if(begin, order.end(), is_barrier);
      std::shuffle(begin, end, random);
      begin = end == order.end() ? end : end + 1;
    }
    return order;
  }

  void run(const DispatchCommand& command) {
    const std::string& name = command.pipeline->info().name;
    Dispatch dispatch{.kernel = command.pipeline->kernel(current_flavour()),
                      .buffers = {},
                      .threadgroup_bytes = command.threadgroup_bytes,
                      .threads_per_grid = command.threads_per_grid,
                      .threads_per_threadgroup = command.threads_per_threadgroup};
    for (const auto& [slot, location] : command.buffers) {
      check_alive(location, "kernel '" + name + "', buffer slot " + std::to_string(slot));
      dispatch.buffers[slot] = {location.storage->contents(), location.storage->length(),
                                location.offset, location.storage->label};
    }
    Outcome outcome = execute(dispatch, {.shuffle_seed = shuffle_seed()});
    count_dispatch();
    record_counters(std::move(outcome.counters));
    if (outcome.fault) throw RunFault(outcome.fault->message);
    if (!pass_.is_concurrent) return;
    if (auto conflict = hazards_.add(name, accesses_of(dispatch, outcome))) {
      throw RunFault(*conflict);
    }
  }

  void run(const BarrierCommand& command) {
    if (command.storages.empty()) return hazards_.clear();
    for (const auto& storage : command.storages) {
      const auto begin = reinterpret_cast<uintptr_t>(storage->contents());
      hazards_.clear(begin, begin + storage->length());
    }
  }

  void run(const CopyCommand& command) {
    check_alive(command.source, "copyFromBuffer");
    check_alive(command.destination, "copyFromBuffer");
    std::memmove(command.destination.storage->contents() + command.destination.offset,
                 command.source.storage->contents() + command.source.offset, command.length);
  }

  void run(const FillCommand& command) {
    check_alive(command.destination, "fillBuffer");
    std::memset(command.destination.storage->contents() + command.destination.offset, command.value,
                command.length);
  }

  void run(const SignalCommand& command) {
    command.event->value = std::max(command.event->value.load(), command.value);
    if (command.event->on_signal) command.event->on_signal(command.value);
  }

  void run(const WaitCommand& command) {
    if (command.event->value >= command.value) return;
    throw RunFault("encodeWaitForEvent: expected a signal of value " +
                   std::to_string(command.value) + " from work committed earlier, found value " +
                   std::to_string(command.event->value.load()) + ": the GPU would wait forever");
  }

  const Pass& pass_;
  HazardTracker hazards_;
};

}  // namespace

void run_list(CommandList& list) {
  list.start_time = seconds_now();
  try {
    if (list.failure.empty()) {
      for (const auto& pass : list.passes) PassRunner(*pass).run();
    }
  } catch (const std::exception& error) {
    list.fail(error.what());
  }
  list.end_time = seconds_now();
  list.finish(!list.failure.empty());
}

}  // namespace sim
