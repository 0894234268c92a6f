// The allocator behind every mps storage, and its counters.
#pragma once

#include <ATen/mps/MPSAllocatorInterface.h>

namespace sim {

at::mps::IMPSAllocator* device_allocator();
c10::Allocator* pinned_allocator();
void set_memory_fraction(double fraction);

// Host memory of an mps storage; null when the storage is empty.
void* host_data(const c10::StorageImpl& storage);
// Replaces the buffer by one of `nbytes`, keeping the bytes that both have.
void resize_storage(c10::StorageImpl& storage, size_t nbytes);

}  // namespace sim
