#include "executor.h"

#include <pthread.h>
#include <sched.h>

#include <semaphore>
#include <thread>

#include "crash_guard.h"
#include "dispatch_run.h"
#include "threadgroup.h"

namespace sim {
namespace {

void work(Threadgroup& threadgroup, DispatchRun& run) {
  const CrashGuard guard(threadgroup);
  threadgroup.begin(run);
  while (const auto position = run.take_position()) threadgroup.execute(*position);
}

// One persistent thread; it sleeps until it is given a dispatch.
class Worker {
 public:
  Worker() {
    std::thread([this] { loop(); }).detach();
  }

  void start(DispatchRun& run) {
    run_ = &run;
    begin_.release();
  }
  void wait() { end_.acquire(); }
  const Threadgroup& threadgroup() const { return threadgroup_; }

 private:
  void loop() {
    for (;;) {
      begin_.acquire();
      work(threadgroup_, *run_);
      end_.release();
    }
  }

  Threadgroup threadgroup_;
  DispatchRun* run_ = nullptr;
  std::binary_semaphore begin_{0}, end_{0};
};

uint32_t num_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

void add(Counters& sum, const Counters& more) {
  sum.threadgroups += more.threadgroups;
  sum.matrix_products += more.matrix_products;
  sum.exponentials += more.exponentials;
  sum.threadgroup_barriers += more.threadgroup_barriers;
  sum.simdgroup_barriers += more.simdgroup_barriers;
  sum.shuffles += more.shuffles;
  sum.device_bytes_read += more.device_bytes_read;
  sum.device_bytes_written += more.device_bytes_written;
  sum.device_bytes_read_distinct += more.device_bytes_read_distinct;
  sum.constant_bytes_read += more.constant_bytes_read;
  sum.threadgroup_bytes_read += more.threadgroup_bytes_read;
  sum.threadgroup_bytes_written += more.threadgroup_bytes_written;
}

uint64_t size_of(const Footprint& footprint) {
  uint64_t bytes = 0;
  for (const auto* ranges : {&footprint.read, &footprint.written}) {
    for (const auto& [begin, end] : *ranges) bytes += end - begin;
  }
  return bytes;
}

// The calling thread works too, so that a small dispatch wakes nobody.
class Pool {
 public:
  // A forked child has none of the threads: it starts with a pool of its own.
  static Pool& instance() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { current() = new Pool; });
    (void)registered;
    return *current();
  }

  void run(DispatchRun& run, uint32_t num_workers, Outcome& outcome) {
    const std::lock_guard lock(mutex_);
    number_threadgroups(run);
    shadow_.begin_dispatch(run.buffers.num_cells(), run.first_number);
    run.shadow = &shadow_;
    const uint64_t wanted = std::min<uint64_t>(num_workers, run.num_threadgroups);
    while (workers_.size() + 1 < wanted) workers_.push_back(std::make_unique<Worker>());
    for (uint64_t i = 0; i + 1 < wanted; ++i) workers_[i]->start(run);
    work(own_, run);
    for (uint64_t i = 0; i + 1 < wanted; ++i) workers_[i]->wait();

    std::vector<const Traffic*> traffic;
    for (uint64_t i = 0; i < wanted; ++i) {
      const Threadgroup& threadgroup = i == 0 ? own_ : workers_[i - 1]->threadgroup();
      add(outcome.counters, threadgroup.counters());
      add(outcome.counters, threadgroup.checker().counters());
      traffic.push_back(&threadgroup.checker().traffic());
    }
    Traffic::collect(traffic, run.buffers, outcome.footprint);
    outcome.counters.device_bytes_footprint = size_of(outcome.footprint);
  }

 private:
  static Pool*& current() {
    static Pool* pool = new Pool;   // never destroyed: its threads outlive static destructors
    return pool;
  }

  void number_threadgroups(DispatchRun& run) {
    if (run.num_threadgroups > UINT32_MAX - next_number_) next_number_ = 1;
    run.first_number = next_number_;
    next_number_ += uint32_t(run.num_threadgroups);
  }

  std::mutex mutex_;
  uint32_t next_number_ = 1;
  DeviceShadow shadow_;
  Threadgroup own_;
  std::vector<std::unique_ptr<Worker>> workers_;
};

// What Metal refuses when the dispatch is encoded.
std::string refusal(const Dispatch& dispatch) {
  const KernelInfo& info = dispatch.kernel->info();
  const Extent& size = dispatch.threads_per_threadgroup;
  const uint64_t threads = uint64_t(size.x) * size.y * size.z;
  const uint32_t most = std::min(info.max_total_threads, kMaxThreadsPerThreadgroup);
  const std::string subject = "kernel '" + info.name + "': ";
  if (threads == 0) return subject + "a threadgroup has no threads";
  if (threads > most) {
    return subject + "a threadgroup of " + std::to_string(size.x) + " x " + std::to_string(size.y) +
           " x " + std::to_string(size.z) + " has " + std::to_string(threads) +
           " threads; the most for this kernel is " + std::to_string(most);
  }
  uint64_t bytes = 0;
  for (uint32_t length : dispatch.threadgroup_bytes) bytes += length;
  if (bytes > kMaxThreadgroupBytes) {
    return subject + "setThreadgroupMemoryLength asks for " + std::to_string(bytes) +
           " bytes of threadgroup memory in total; a threadgroup has " +
           std::to_string(kMaxThreadgroupBytes);
  }
  return "";
}

}  // namespace

Outcome execute(const Dispatch& dispatch, const ExecutorOptions& options) {
  Outcome outcome;
  outcome.counters.kernel = dispatch.kernel->info().name;
  if (std::string message = refusal(dispatch); !message.empty()) {
    outcome.fault = Fault{outcome.counters.kernel, std::move(message)};
    return outcome;
  }
  DispatchRun run(dispatch, options);
  if (run.num_threadgroups == 0) return outcome;
  static const uint32_t cores = num_cores();
  Pool::instance().run(run, options.num_workers ? options.num_workers : cores, outcome);
  outcome.fault = run.fault();
  return outcome;
}

}  // namespace sim
