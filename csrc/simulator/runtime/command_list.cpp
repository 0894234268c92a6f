#include "command_list.h"

#include "device_state.h"
#include "timeline.h"

namespace sim {

CommandList::CommandList() {
  count_command_buffer();
}

CommandList::~CommandList() {
  for (void* object : retained_) release_object(object);
}

void CommandList::fail(const std::string& message) {
  const std::string complete =
      label.empty() ? message : "command buffer '" + label + "': " + message;
  if (failure.empty()) failure = complete;
  report_fault(complete);
}

Pass* CommandList::begin_pass(const char* encoder, bool is_concurrent) {
  if (!is_recording()) {
    fail(std::string(encoder) +
         ": expected a command buffer that is not committed yet, found a "
         "committed one");
    return nullptr;
  }
  if (has_open_pass_) {
    fail(std::string(encoder) +
         ": expected no open encoder, found one that endEncoding has not "
         "closed");
    return nullptr;
  }
  has_open_pass_ = true;
  passes.push_back(std::make_unique<Pass>());
  passes.back()->is_concurrent = is_concurrent;
  return passes.back().get();
}

void CommandList::add_between_passes(const char* what, Command command) {
  if (auto* pass = begin_pass(what, false)) {
    pass->commands.push_back(std::move(command));
    end_pass();
  }
}

void CommandList::enqueue() {
  auto expected = ListStatus::Recording;
  status_.compare_exchange_strong(expected, ListStatus::Enqueued);
}

void CommandList::commit() {
  if (!is_recording()) {
    return fail(
        "commit: expected a command buffer that is not committed yet, found a committed one");
  }
  if (has_open_pass_) {
    fail("commit: expected no open encoder, found one that endEncoding has not closed");
  }
  count_commit();
  status_ = ListStatus::Committed;
  for (auto& handler : scheduled_handlers) handler();
  scheduled_handlers.clear();
  submit(shared_from_this());
}

void CommandList::retain(void* object) {
  retain_object(object);
  retained_.push_back(object);
}

void CommandList::finish(bool failed) {
  passes.clear();
  for (void* object : retained_) release_object(object);
  retained_.clear();
  status_.store(failed ? ListStatus::Failed : ListStatus::Completed, std::memory_order_release);
}

}  // namespace sim
