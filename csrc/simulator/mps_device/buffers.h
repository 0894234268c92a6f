// The device and its buffers, for code that speaks no Objective-C.
//
// As in PyTorch, the data pointer of an mps storage is the id<MTLBuffer> itself; the bytes are its
// contents.
#pragma once

#include <cstddef>
#include <string>

namespace sim {

// A shared-storage buffer of exactly `length` bytes; null when memory has run out.
void* new_buffer(size_t length);
// Drops the allocator's reference. Encoded work that still uses the buffer keeps it alive, as on a
// Mac; the memory is poisoned when the last user lets go.
void release_buffer(void* buffer);
void* buffer_contents(const void* buffer);
size_t buffer_length(const void* buffer);

std::string device_name();
unsigned device_core_count();
size_t recommended_max_memory();
size_t max_buffer_length();

}  // namespace sim
