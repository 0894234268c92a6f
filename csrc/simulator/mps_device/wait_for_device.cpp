// Apart from stream.mm, because exceptions do not belong into Objective-C++ frames.
#include <c10/util/Exception.h>

#include <string>

#include "runtime/device_state.h"
#include "stream.h"

namespace sim {

void wait_for_device() {
  if (stream_has_pending_work()) drain_stream();
  if (!has_fault()) return;
  std::string message;
  size_t others = 0;
  while (auto fault = take_fault()) {
    if (message.empty())
      message = std::move(*fault);
    else
      ++others;
  }
  if (others) message += " (and " + std::to_string(others) + " more)";
  TORCH_CHECK(message.empty(), message);
}

}  // namespace sim
