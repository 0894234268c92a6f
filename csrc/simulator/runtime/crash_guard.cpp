#include "crash_guard.h"

#include <signal.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>

namespace sim {
namespace {

constexpr std::array<int, 4> kSignals = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
constexpr size_t kSignalStackBytes = 64 * 1024;

// Read in the handler, so storage that needs no allocation on first use.
__attribute__((tls_model("initial-exec"))) thread_local Threadgroup* running_here = nullptr;
struct sigaction previous_actions[kSignals.size()];

Crash read_crash(int signal, const siginfo_t* info, const void* context) {
  Crash crash;
  crash.signal = signal;
  crash.address = reinterpret_cast<uintptr_t>(info->si_addr);
  crash.has_address = info->si_code != SI_KERNEL;   // a pointer too large for any page table
  const auto* user = static_cast<const ucontext_t*>(context);
#if defined(__x86_64__)
  constexpr int kWriteBit = 2;   // of the page fault's error code
  crash.stack_pointer = user->uc_mcontext.gregs[REG_RSP];
  crash.is_write = (user->uc_mcontext.gregs[REG_ERR] & kWriteBit) != 0;
#elif defined(__aarch64__)
  crash.stack_pointer = user->uc_mcontext.sp;
#endif
  return crash;
}

void handle(int signal, siginfo_t* info, void* context) {
  if (running_here && running_here->is_running()) {
    running_here->crash(read_crash(signal, info, context));
  }
  const size_t i = std::find(kSignals.begin(), kSignals.end(), signal) - kSignals.begin();
  const struct sigaction& previous = previous_actions[i];
  const bool has_handler = (previous.sa_flags & SA_SIGINFO) ||
                           (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN);
  // A handler that restores what it had replaced (us) and raises the signal again must not loop.
  static thread_local bool is_chaining = false;
  if (!has_handler || is_chaining) {
    ::signal(signal, SIG_DFL);   // the instruction runs again, and ends the process
    return;
  }
  is_chaining = true;
  if (previous.sa_flags & SA_SIGINFO) {
    previous.sa_sigaction(signal, info, context);
  } else {
    previous.sa_handler(signal);
  }
  is_chaining = false;
}

// Another library may have set its own handlers since the last dispatch (Python's faulthandler does).
void install_handlers() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  for (size_t i = 0; i < kSignals.size(); ++i) {
    struct sigaction present;
    sigaction(kSignals[i], nullptr, &present);
    if ((present.sa_flags & SA_SIGINFO) && present.sa_sigaction == handle) continue;
    previous_actions[i] = present;
    struct sigaction ours{};
    ours.sa_sigaction = handle;
    // The handler leaves by switching fibres: the signal must not stay blocked.
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&ours.sa_mask);
    sigaction(kSignals[i], &ours, nullptr);
  }
}

// A fibre that has run out of stack cannot run a handler on it.
class SignalStack {
 public:
  SignalStack() {
    stack_t present;
    if (sigaltstack(nullptr, &present) == 0 && !(present.ss_flags & SS_DISABLE)) return;
    memory_ = std::make_unique<char[]>(kSignalStackBytes);
    stack_t ours{};
    ours.ss_sp = memory_.get();
    ours.ss_size = kSignalStackBytes;
    sigaltstack(&ours, nullptr);
  }
  ~SignalStack() {
    if (!memory_) return;
    stack_t present;
    sigaltstack(nullptr, &present);
    if (present.ss_sp != memory_.get()) return;
    present.ss_flags = SS_DISABLE;
    sigaltstack(&present, nullptr);
  }

 private:
  std::unique_ptr<char[]> memory_;
};

}  // namespace

CrashGuard::CrashGuard(Threadgroup& threadgroup) {
  thread_local const SignalStack stack;
  (void)stack;
  install_handlers();
  running_here = &threadgroup;
}

CrashGuard::~CrashGuard() {
  running_here = nullptr;
}

}  // namespace sim
