// Turns a crash of a kernel into a fault of its dispatch.
#pragma once

#include "threadgroup.h"

namespace sim {

// While this exists, a SIGSEGV, SIGBUS, SIGFPE or SIGILL of a fibre on this thread goes to
// `threadgroup`. Signals from elsewhere go to the handlers that were there before.
class CrashGuard {
 public:
  explicit CrashGuard(Threadgroup& threadgroup);
  ~CrashGuard();
  CrashGuard(const CrashGuard&) = delete;
  CrashGuard& operator=(const CrashGuard&) = delete;
};

}  // namespace sim
