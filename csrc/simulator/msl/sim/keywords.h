// MSL keywords as clang attributes. The address spaces are distinct types to the front end and plain
// memory to the back end: x86 and arm64 map all of clang's OpenCL address spaces to 0.
#pragma once

#define device __attribute__((opencl_global))
#define constant const __attribute__((opencl_constant))
#define threadgroup __attribute__((opencl_local))
#define thread

// Functions of the library that touch the executor's memory. They are inlined into plain kernels and
// stay out of line in instrumented ones, whose hooks must only see the kernel's own accesses.
#define SIM_HIDDEN __attribute__((no_sanitize("kernel-address")))

#define METAL_FUNC inline __attribute__((always_inline))
#define METAL_CONST constant
#define METAL_INTERNAL inline

// Kernels other than the one being built are never referenced, so inline keeps them out of the object.
#define kernel inline
