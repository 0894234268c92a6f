"""Kernels with a fault planted in them, and the twins without it.

A body of MSL is built with FAULT 1 and with FAULT 0. All take the same arguments and run as two
threadgroups of two simdgroups.
"""

import re

import numpy as np

THREADS, GROUP_SIZE = 128, 64
ORDERS = (None, 1, 2, 3)           # ascending, and seeds of shuffled ones
LIBRARIES = ("faulty", "clean")
PREAMBLE = """
#include <metal_stdlib>
using namespace metal;

#define KERNEL(name)                                                                             \\
  kernel void name(device float* out [[buffer(0)]], const device float* in [[buffer(1)]],        \\
                   constant float* table [[buffer(2)]], device atomic_uint* count [[buffer(3)]], \\
                   threadgroup float* scratch [[threadgroup(0)]],                                \\
                   uint i [[thread_position_in_grid]],                                           \\
                   uint t [[thread_index_in_threadgroup]],                                       \\
                   uint group [[threadgroup_position_in_grid]],                                  \\
                   uint lane [[thread_index_in_simdgroup]])
"""
THREAD = re.compile(r"thread \((\d+), 0, 0\) \(threadgroup \((\d), 0, 0\), simdgroup (\d), "
                    r"lane (\d+)\)")


def thread(index: int) -> str:
    """How a message calls the thread with this position in the grid."""
    group, place = divmod(index, GROUP_SIZE)
    return (f"thread ({index}, 0, 0) (threadgroup ({group}, 0, 0), simdgroup {place // 32}, "
            f"lane {place % 32})")


class Plants:
    """Both libraries of a set of kernels: name -> (body, report of the fault)."""

    def __init__(self, metal, cases: dict[str, tuple[str, str]]):
        self._metal = metal
        kernels = [f"KERNEL({name}) {{\n{body}\n}}" for name, (body, _) in cases.items()]
        self._source = "\n".join([PREAMBLE, *kernels])
        self._cases = cases
        self._libraries = {
            name: metal.Library(self._source, macros={"FAULT": str(int(name == "faulty")),
                                                      "GROUP": str(GROUP_SIZE)})
            for name in LIBRARIES
        }

    def report(self, name: str) -> str:
        """What is said of the kernel in ascending order; `line +1` is the first of its body."""
        start = self._source[:self._source.index(f"KERNEL({name})")].count("\n") + 1
        report = re.sub(r"line \+(\d)", lambda found: f"line {start + int(found[1])}",
                        self._cases[name][1])
        return f"kernel '{name}': {report}"

    def run(self, library: str, name: str, order: int | None) -> str:
        """What the simulated device said of one run; nothing when it found no fault."""
        kernel = self._libraries[library].kernel(name)
        numbers = [np.zeros(THREADS, dtype=np.float32) for _ in range(2)]
        table, count = np.zeros(4, dtype=np.float32), np.zeros(THREADS, dtype=np.uint32)
        self._metal.set_shuffle_seed(order)
        try:
            kernel(*numbers, table.tobytes(), count, grid=(THREADS // GROUP_SIZE, 1, 1),
                   threadgroup=(GROUP_SIZE, 1, 1), threadgroup_memory={0: 4 * GROUP_SIZE})
        except RuntimeError as fault:
            return str(fault)
        finally:
            self._metal.set_shuffle_seed(None)
        return ""

    def check(self, name: str) -> None:
        """The twin is silent in every order; the fault is reported in each, by real threads."""
        for order in ORDERS:
            assert self.run("clean", name, order) == "", f"order {order}: a fault without a cause"
        expected = self.report(name)
        pattern = re.escape(expected).replace(r"\*", r"\d+")   # an access that clang may split
        found = self.run("faulty", name, None)
        assert re.fullmatch(pattern, found), f"expected '{expected}', found '{found}'"
        for order in ORDERS[1:]:
            found = self.run("faulty", name, order)
            assert found.startswith(f"kernel '{name}': thread ("), f"order {order}: '{found}'"
            for index, *_ in THREAD.findall(found):
                assert thread(int(index)) in found, "one thread has one place"
            # Another thread may meet the fault first, in the same memory or at the same barrier.
            for part in re.findall(r"of (?:slot|threadgroup array) .*? \(\d+ bytes\)|line \d+"
                                   r"|in between|not ordered|must reach", expected):
                assert part in found, f"order {order}"
