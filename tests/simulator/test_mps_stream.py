"""PyTorch's stream on the simulated device, as the host code of an extension uses it."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if sys.platform == "darwin":
    pytest.skip("on a Mac the stream is PyTorch's own", allow_module_level=True)

from torch.utils.cpp_extension import include_paths

from build_support.simulator import OBJC_FLAGS, find_compiler
from torch_flash_mps import _extension

ROOT = Path(__file__).resolve().parents[2]
SIMULATOR = ROOT / "csrc" / "simulator"
NONE, COMMIT, COMMIT_AND_WAIT, COMMIT_AND_CONTINUE = range(4)


@pytest.fixture(scope="module")
def client(simulator, tmp_path_factory):
    """The functions of stream/client.mm."""
    library = tmp_path_factory.mktemp("stream") / "client.so"
    sources = [Path(__file__).parent / "stream" / "client.mm",
               SIMULATOR / "runtime" / "objc_personality.cpp"]
    includes = [f"-isystem{folder}" for folder in (SIMULATOR / "frameworks", *include_paths())]
    subprocess.run([*find_compiler(), "-std=c++20", "-O1", "-shared", "-fPIC", *OBJC_FLAGS,
                    *includes, *sources, "-o", library], check=True)
    # The symbols of at::mps are those of the loaded module; Python keeps them to itself.
    ctypes.CDLL(simulator._module.__file__, mode=ctypes.RTLD_GLOBAL)
    functions = ctypes.CDLL(str(library))
    functions.encoder_on_queue.restype = ctypes.c_void_p
    functions.buffer_length.restype = ctypes.c_size_t
    for name in ("rethrows", "supports_apple", "is_macos_14_4"):
        getattr(functions, name).restype = ctypes.c_bool
    return functions


def storage(tensor):
    return ctypes.c_void_p(tensor.untyped_storage().data_ptr())


def filled_with(value, tensor):
    return bool((tensor.view(torch.uint8) == value).all())


@pytest.fixture
def done(simulator, device):
    """How many command buffers have been committed since the test began."""
    torch.mps.synchronize()
    before = simulator.stats()["commits"]
    return lambda: simulator._module.stats()["commits"] - before


@pytest.mark.parametrize("length", [1, 7, 4096, 100_003])
def test_a_storage_points_to_a_buffer_of_its_length(client, device, length):
    assert client.buffer_length(storage(torch.empty(length, dtype=torch.uint8, device=device))) \
        == length


def test_views_and_allocations_do_not_wait(client, device, done):
    torch.use_deterministic_algorithms(False)
    x = torch.zeros(64, device=device)
    client.encode_fill(storage(x), 3)
    seen = [x[1:], x.view(8, 8).t(), x.expand(2, 64), x.unfold(0, 2, 2), x.detach(),
            torch.empty_like(x)]
    assert done() == 0 and len(seen) == 6
    assert filled_with(3, x) and done() == 1


@pytest.mark.parametrize("look", [
    lambda x: x.cpu(), lambda x: x.sum(), lambda x: x[0].item(), lambda x: torch.mps.synchronize(),
    lambda x: x.add_(1), lambda x: torch.accelerator.synchronize(), lambda x: x.clone(),
    lambda x: torch.empty(64).copy_(x), lambda x: torch.mps.Event().record(),
], ids=["cpu", "sum", "item", "synchronize", "in-place", "accelerator", "clone", "copy_", "event"])
def test_what_waits(client, device, done, look):
    x = torch.zeros(64, device=device)
    client.encode_fill(storage(x), 0)
    assert done() == 0
    look(x)
    assert done() == 1


def test_work_is_ordered_with_torchs_operators(client, device):
    x = torch.zeros(64, device=device)
    y = torch.zeros(64, device=device)
    client.encode_fill(storage(x), 1)
    client.encode_copy(storage(x), storage(y), 256)
    x.zero_()
    assert filled_with(1, y) and filled_with(0, x)


def test_memory_freed_by_torch_serves_the_work_that_uses_it(client, device):
    y = torch.zeros(1024, device=device)
    x = torch.full((1024,), 5.0, device=device)
    client.encode_copy(storage(x), storage(y), 4096)
    del x
    held = [torch.zeros(1024) for _ in range(4)]
    assert (y == 5).all() and len(held) == 4


def test_kernels_share_an_encoder_until_coalescing_ends(client, device):
    first, second, third = (client.encoder_on_queue(end) for end in (False, False, True))
    assert first == second != third
    torch.mps.synchronize()
    for encoder in (first, second, third):
        client.release_encoder(ctypes.c_void_p(encoder))


def test_commit_goes_on_with_the_same_stream(client, device, done):
    x = torch.zeros(16, device=device)
    for sync_type in (NONE, COMMIT, COMMIT_AND_CONTINUE, COMMIT_AND_WAIT):
        client.encode_fill(storage(x), sync_type + 1)
        client.synchronize(sync_type)
    assert done() == 3
    assert filled_with(COMMIT_AND_WAIT + 1, x) and done() == 3


def test_the_public_api_of_torch(client, device, done):
    x = torch.zeros(16, device=device)
    client.fill_through_public_api(storage(x), 9)
    assert done() == 1 and filled_with(9, x)


def test_an_encoder_outside_the_queue_is_reported(client, device, simulator):
    with simulator.checks(True):
        client.encoder_outside_queue()
        with pytest.raises(RuntimeError, match="commandEncoder.*dispatch queue.*from outside"):
            torch.mps.synchronize()
    torch.mps.synchronize()
    with simulator.checks(False):
        client.encoder_outside_queue()


def test_HD_14_a_fault_is_raised_once_by_the_next_operator(client, device, simulator):
    x = torch.ones(3, device=device)
    with simulator.checks(True):
        client.encoder_outside_queue()
        client.encoder_outside_queue()
        with pytest.raises(RuntimeError, match=r"commandEncoder.*\(and 1 more\)"):
            x + 1
        assert (x + 1).tolist() == [2, 2, 2]


def test_exceptions_leave_a_block(client, device):
    assert client.rethrows()


def test_which_machine_it_is(client, device, simulator):
    family = int(simulator._module.gpu_family().removeprefix("apple"))
    assert client.supports_apple(family) and not client.supports_apple(family + 1)
    assert client.is_macos_14_4()


@pytest.mark.parametrize("cores, expected", [(40, 40), (0, 0), (None, 0)])
def test_how_many_cores_it_has(device, simulator, cores, expected):
    """The library takes a machine that does not say for one of no cores, not for an error."""
    assert _extension.extension().gpu_cores() == 8
    simulator.set_gpu_cores(cores)
    try:
        assert _extension.extension().gpu_cores() == expected
        if cores is not None:
            assert torch._C._mps_get_core_count() == cores
    finally:
        simulator.set_gpu_cores(8)
