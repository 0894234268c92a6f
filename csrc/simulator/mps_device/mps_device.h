// The simulated `mps` device of a torch that was built without one.
#pragma once

#include <pybind11/pybind11.h>

namespace sim {

// Loading the library registers allocator, guard, kernels and fallback with torch. This makes torch
// aware of them, and adds to the module the functions that torch's Python side misses without MPS.
void bind_mps_device(pybind11::module_& module);

}  // namespace sim
