#include "timeline.h"

#include <deque>
#include <mutex>

#include "device_state.h"
#include "list_runner.h"

namespace sim {
namespace {

constexpr size_t kMaxPending = 64;   // Apple's default for a queue

struct Timeline {
  std::mutex running;   // held while a list runs: the GPU does one at a time
  std::mutex mutex;     // guards `pending`
  std::deque<std::shared_ptr<CommandList>> pending;
};

Timeline& timeline() {
  static auto* instance = new Timeline;
  return *instance;
}

std::shared_ptr<CommandList> pop_pending() {
  std::lock_guard lock(timeline().mutex);
  auto& pending = timeline().pending;
  if (pending.empty()) return nullptr;
  auto list = std::move(pending.front());
  pending.pop_front();
  return list;
}

// Handlers run without the lock: they may commit, and wait, themselves.
bool run_next() {
  std::shared_ptr<CommandList> list;
  {
    std::lock_guard lock(timeline().running);
    list = pop_pending();
    if (list) run_list(*list);
  }
  if (!list) return false;
  for (auto& handler : list->completed_handlers) handler();
  list->completed_handlers.clear();
  return true;
}

bool is_over(const CommandList& list) {
  return list.status() >= ListStatus::Completed;
}

}  // namespace

void submit(std::shared_ptr<CommandList> list) {
  size_t num_pending;
  {
    std::lock_guard lock(timeline().mutex);
    timeline().pending.push_back(std::move(list));
    num_pending = timeline().pending.size();
  }
  if (num_pending > kMaxPending) run_next();
}

bool run_until(const std::shared_ptr<CommandList>& list) {
  if (list->is_recording()) return false;
  while (!is_over(*list)) {
    if (run_next()) continue;
    std::lock_guard wait_for_other_thread(timeline().running);
  }
  return true;
}

void run_all() {
  while (run_next()) {
  }
}

}  // namespace sim
