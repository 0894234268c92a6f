// Words that the messages of faults are made of.
#pragma once

#include <string>

#include "kernel_abi.h"

namespace sim {

std::string describe_position(const uint32_t (&position)[3]);
// "thread (37, 0, 0) (threadgroup (1, 0, 0), simdgroup 0, lane 5)"
std::string describe_thread(const Thread& thread);

}  // namespace sim
