// Serial queues of libdispatch, data objects and the clock that comes with them.
#include <dispatch/dispatch.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "device_state.h"

struct dispatch_object {
  virtual ~dispatch_object() = default;
  std::atomic<int> references{1};
};

struct dispatch_queue_s : dispatch_object {
  std::string label;
  std::mutex mutex;
  std::atomic<std::thread::id> owner;
};

struct dispatch_data_s : dispatch_object {
  std::string bytes;
};

namespace {

// The innermost queue that the calling thread holds.
thread_local dispatch_queue_t current_queue = nullptr;

// Runs on the calling thread, as libdispatch does too. A thread that already holds the queue would
// wait for itself; libdispatch traps there, we report and throw.
class QueueHold {
 public:
  explicit QueueHold(dispatch_queue_t queue) : queue_(queue), outer_(current_queue) {
    if (queue->owner.load() == std::this_thread::get_id()) {
      const std::string message = "dispatch_sync on queue '" + queue->label +
                                  "': the calling thread already runs a block of this queue; on a "
                                  "Mac this is a deadlock";
      sim::report_fault(message);
      throw std::runtime_error(message);
    }
    queue->mutex.lock();
    queue->owner = std::this_thread::get_id();
    current_queue = queue;
  }
  ~QueueHold() {
    current_queue = outer_;
    queue_->owner = std::thread::id();
    queue_->mutex.unlock();
  }

 private:
  dispatch_queue_t queue_, outer_;
};

}  // namespace

extern "C" {

dispatch_queue_t dispatch_queue_create(const char* label, dispatch_queue_attr_t) {
  auto* queue = new dispatch_queue_s;
  queue->label = label ? label : "";
  return queue;
}

void dispatch_sync_f(dispatch_queue_t queue, void* context, dispatch_function_t work) {
  QueueHold hold(queue);
  work(context);
}

void dispatch_sync(dispatch_queue_t queue, dispatch_block_t block) {
  QueueHold hold(queue);
  block();
}

void dispatch_retain(void* object) {
  ++static_cast<dispatch_object*>(object)->references;
}

void dispatch_release(void* object) {
  auto* counted = static_cast<dispatch_object*>(object);
  if (--counted->references == 0) delete counted;
}

// Without a queue, the label of the current one (DISPATCH_CURRENT_QUEUE_LABEL).
const char* dispatch_queue_get_label(dispatch_queue_t queue) {
  if (queue == DISPATCH_CURRENT_QUEUE_LABEL) queue = current_queue;
  return queue ? queue->label.c_str() : "";
}

dispatch_data_t dispatch_data_create(const void* buffer, size_t size, dispatch_queue_t,
                                     dispatch_block_t) {
  auto* data = new dispatch_data_s;
  data->bytes.assign(static_cast<const char*>(buffer), size);
  return data;
}

size_t dispatch_data_get_size(dispatch_data_t data) {
  return data->bytes.size();
}

uint64_t clock_gettime_nsec_np(clockid_t clock_id) {
  timespec now{};
  clock_gettime(clock_id, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000 + static_cast<uint64_t>(now.tv_nsec);
}

}  // extern "C"
