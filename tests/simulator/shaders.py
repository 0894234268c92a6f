"""Runs one and the same Metal source on the simulated device and on a Mac."""

import sys

import numpy as np
import torch

ON_MAC = sys.platform == "darwin"
# How kernels run: once as they are, once with every check and their threads in another order.
FLAVOURS = ("plain", "checked")
HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"


class Shaders:
    """The kernels of one source."""

    def __init__(self, source: str):
        if ON_MAC:
            self._library = torch.mps.compile_shader(HEADER + source)
        else:
            from torch_flash_mps import _simulator

            self._library = _simulator.Library(HEADER + source)

    def run(self, name: str, *arrays: np.ndarray, threads=32, group_size=32) -> None:
        """Binds array i at slot i and runs so many threads; the arrays change in place."""
        grid, group = _three(threads), _three(group_size)
        if ON_MAC:
            tensors = [torch.from_numpy(array.view(np.uint8)).to("mps") for array in arrays]
            getattr(self._library, name)(*tensors, threads=grid, group_size=group)
            for array, tensor in zip(arrays, tensors, strict=True):
                array.view(np.uint8)[...] = tensor.cpu().numpy()
        else:
            self._library.kernel(name)(*arrays, grid=grid, threadgroup=group, grid_is_threads=True)


def _three(size: int | tuple[int, ...]) -> tuple[int, ...]:
    size = size if isinstance(size, tuple) else (size,)
    return size + (1,) * (3 - len(size))


def filled(*shape: int, dtype=np.float32) -> np.ndarray:
    """A result to be, full of bytes that no right answer has."""
    return np.full(np.prod(shape) * np.dtype(dtype).itemsize, 0xA5, np.uint8).view(dtype).reshape(
        shape)


def bfloat_bits(values: np.ndarray) -> np.ndarray:
    """The values as bfloat16, rounded as torch does."""
    return torch.from_numpy(np.asarray(values, np.float32)).bfloat16().view(torch.int16).numpy()


def from_bfloat_bits(bits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
