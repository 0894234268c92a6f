// The simulated `mps` device of a torch that was built without one.
#pragma once

namespace sim {

// Loading the library registers allocator, guard, kernels and fallback. This does what must wait
// until all of them are there; the module calls it once, on import.
void join_torch();

}  // namespace sim
