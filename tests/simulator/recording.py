"""What the tests of Metal's API share: kernels, buffers and one recorded encoder."""

import numpy as np

SOURCE = """
#include <metal_stdlib>
using namespace metal;

constant int kAddend [[function_constant(0)]];
constant bool kTwice [[function_constant(1)]];

kernel void add(device float* out [[buffer(0)]], constant uint& count [[buffer(1)]],
                uint i [[thread_position_in_grid]]) {
  if (i < count) out[i] += kTwice ? 2 * kAddend : kAddend;
}

kernel void copy(device float* out [[buffer(0)]], const device float* in [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) {
  out[i] = in[i];
}

kernel void two_arrays(device float* out [[buffer(0)]], threadgroup float* a [[threadgroup(0)]],
                       threadgroup float* b [[threadgroup(1)]]) {
  a[0] = 1;
  b[0] = 2;
  out[0] = a[0] + b[0];
}

kernel void shared_sum(device float* out [[buffer(0)]],
                       threadgroup float* scratch [[threadgroup(0)]],
                       uint i [[thread_index_in_threadgroup]]) {
  scratch[i] = float(i);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (i == 0) out[0] = scratch[0] + scratch[1] + scratch[2] + scratch[3];
}
"""
COUNT = 8
NBYTES = 4 * COUNT


def faults(metal) -> list[str]:
    return list(iter(metal.take_fault, None))


def count_bytes(count: int) -> bytes:
    return np.uint32(count).tobytes()


def make_buffer(metal, values):
    array = np.asarray(values, dtype=np.float32)
    buffer = metal.Buffer(array.nbytes, "numbers")
    buffer.write(array.tobytes())
    return buffer


def floats(buffer) -> np.ndarray:
    return np.frombuffer(buffer.read(), dtype=np.float32)


class Recording:
    """One compute encoder on a command buffer, ready for a dispatch of `add` that is right."""

    def __init__(self, metal, kernel, *, concurrent=False, retained=True):
        self.commands = metal.CommandBuffer(retained=retained)
        self.encoder = self.commands.compute_encoder(concurrent)
        self.numbers = make_buffer(metal, range(COUNT))
        self.encoder.set_pipeline(kernel)
        self.encoder.set_buffer(self.numbers, 0, 0)
        self.encoder.set_bytes(count_bytes(COUNT), 1)

    def dispatch(self, grid=(1, 1, 1), threadgroup=(COUNT, 1, 1)):
        self.encoder.dispatch_threadgroups(grid, threadgroup)

    def finish(self):
        self.encoder.end()
        self.commands.commit()
        self.commands.wait()
