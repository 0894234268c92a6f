// What the torch side of the simulated `mps` device needs from Metal, without a Metal type in sight.
//
// As in PyTorch, the data pointer of an mps storage is the id<MTLBuffer> itself; the bytes are its
// contents. Every function here may be called from any thread.
#pragma once

#include <cstddef>

namespace sim {

// A shared-storage MTLBuffer of exactly `length` bytes, all 0xFF; null when memory has run out.
void* new_buffer(size_t length);
// Drops the allocator's reference. Encoded work that still uses the buffer keeps it alive, as on a Mac.
void release_buffer(void* buffer);
void* buffer_contents(const void* buffer);
size_t buffer_length(const void* buffer);

// Commits and waits for what PyTorch's stream has pending, so that the host may read and write every
// buffer. Costs a few nanoseconds when nothing is pending. Throws what a kernel did wrong meanwhile.
void wait_for_device();

void commit_stream();
void* stream_command_buffer();
void* stream_dispatch_queue();

size_t recommended_max_memory();
size_t max_buffer_length();

}  // namespace sim
