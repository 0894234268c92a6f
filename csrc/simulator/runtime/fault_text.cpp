#include "fault_text.h"

namespace sim {

std::string describe_position(const uint32_t (&position)[3]) {
  return "(" + std::to_string(position[0]) + ", " + std::to_string(position[1]) + ", " +
         std::to_string(position[2]) + ")";
}

std::string describe_thread(const Thread& thread) {
  return "thread " + describe_position(thread.thread_position_in_grid) + " (threadgroup " +
         describe_position(thread.threadgroup_position_in_grid) + ", simdgroup " +
         std::to_string(thread.simdgroup_index_in_threadgroup) + ", lane " +
         std::to_string(thread.lane) + ")";
}

}  // namespace sim
