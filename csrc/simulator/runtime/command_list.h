// What a command buffer holds: passes of recorded commands, and what became of them.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "executor.h"
#include "memory.h"
#include "pipeline.h"

namespace sim {

// A place in a buffer.
struct Location {
  std::shared_ptr<Storage> storage;
  uint64_t offset = 0;
};

struct DispatchCommand {
  std::shared_ptr<Pipeline> pipeline;
  std::vector<std::pair<uint32_t, Location>> buffers;   // by slot
  std::array<uint32_t, kMaxBuffers> threadgroup_bytes{};
  Extent threads_per_grid, threads_per_threadgroup;
};

// Orders the dispatches around it in a concurrent pass.
struct BarrierCommand {
  std::vector<std::shared_ptr<Storage>> storages;   // empty: all memory
};

struct CopyCommand {
  Location source, destination;
  uint64_t length;
};

struct FillCommand {
  Location destination;
  uint64_t length;
  uint8_t value;
};

struct Event {
  std::atomic<uint64_t> value{0};
  std::function<void(uint64_t)> on_signal;  // set by a shared event, which notifies its listeners
};

struct SignalCommand {
  std::shared_ptr<Event> event;
  uint64_t value;
};

struct WaitCommand {
  std::shared_ptr<Event> event;
  uint64_t value;
};

using Command = std::variant<DispatchCommand, BarrierCommand, CopyCommand, FillCommand,
                             SignalCommand, WaitCommand>;

struct Pass {
  bool is_concurrent = false;
  std::vector<Command> commands;
};

enum class ListStatus { Recording, Enqueued, Committed, Completed, Failed };

// Recorded by one thread at a time, as Metal demands; run by whichever thread waits.
class CommandList : public std::enable_shared_from_this<CommandList> {
 public:
  CommandList();
  ~CommandList();

  // Reports the fault and makes the list fail when it is committed.
  void fail(const std::string& message);
  // Begins a pass; null, and a fault, when the list does not take one now.
  Pass* begin_pass(const char* encoder, bool is_concurrent);
  void end_pass() { has_open_pass_ = false; }
  // Signals and waits lie between passes.
  void add_between_passes(const char* what, Command command);
  // Hands the list to the GPU's timeline, unless it was handed over before.
  void commit();
  // Keeps an Objective-C object until the work is over.
  void retain(void* object);
  // For the thread that runs the list.
  void finish(bool failed);

  ListStatus status() const { return status_.load(std::memory_order_acquire); }
  bool is_recording() const { return status() <= ListStatus::Enqueued; }
  void enqueue();

  std::string label;
  bool retains_references = true;
  std::vector<std::unique_ptr<Pass>> passes;
  std::string failure;  // first fault, also in the process-wide list
  double start_time = 0, end_time = 0;
  std::vector<std::function<void()>> completed_handlers, scheduled_handlers;

 private:
  std::atomic<ListStatus> status_{ListStatus::Recording};
  bool has_open_pass_ = false;
  std::vector<void*> retained_;
};

// Objective-C's retain and release, for the plain C++ half.
void retain_object(void* object);
void release_object(void* object);

}  // namespace sim
