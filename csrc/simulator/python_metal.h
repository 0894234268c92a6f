// Metal in Python: libraries, kernels, buffers and command buffers, for tests of any Metal source.
#pragma once

#include <pybind11/pybind11.h>

namespace sim {

void bind_metal(pybind11::module_& module);

}  // namespace sim
