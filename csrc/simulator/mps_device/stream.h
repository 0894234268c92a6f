// PyTorch's stream on the simulated device, for code that speaks no Objective-C.
#pragma once

namespace sim {

// Commits and waits for what the stream has pending, so that the host may read and write every
// buffer; raises what a kernel did wrong meanwhile. A few nanoseconds when nothing is pending.
void wait_for_device();

void commit_stream();
void* stream_command_buffer();
void* stream_dispatch_queue();

// The parts of wait_for_device that must be Objective-C++.
bool stream_has_pending_work();
void drain_stream();

}  // namespace sim
