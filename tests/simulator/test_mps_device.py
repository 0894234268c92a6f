"""The simulated `mps` device as torch sees it: memory, copies, random numbers, files, threads."""

import copy
import io
import pickle
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.nn.functional as F

if sys.platform == "darwin":
    pytest.skip("these tests are about the simulated device", allow_module_level=True)


@pytest.mark.parametrize("make", [
    lambda device: torch.ones(2, dtype=torch.float64, device=device),
    lambda device: torch.empty_strided((2,), (1,), dtype=torch.complex128, device=device),
    lambda device: torch.ones(2, dtype=torch.float64).to(device),
    lambda device: torch.ones(2, device=device).double(),
])
def test_float64_is_refused_as_on_a_mac(device, make):
    with pytest.raises(TypeError, match="doesn't support float64"):
        make(device)


def test_copies_convert_and_keep_layouts(device):
    x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    moved = x.to(device, non_blocking=True)
    assert moved.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(moved.cpu(), x)
    assert torch.equal(moved.to("cpu", torch.float64), x.double())
    assert torch.equal(x.transpose(1, 3)[1].to(device).cpu(), x.transpose(1, 3)[1])
    back = torch.empty(4, 3)
    back.t().copy_(torch.arange(12.0, device=device).view(3, 4))
    assert torch.equal(back.t(), torch.arange(12.0).view(3, 4))


def test_memory_of_the_host_is_refused(device):
    with pytest.raises(TypeError, match="can't convert mps:0 device type tensor to numpy"):
        torch.ones(2, device=device).numpy()


def test_pinned_memory(device):
    x = torch.randn(5).pin_memory()
    assert x.is_pinned() and x[2:].is_pinned() and not torch.randn(5).is_pinned()
    assert torch.equal(x.to(device, non_blocking=True).cpu(), x)


def test_storage_is_the_metal_buffer(device):
    x = torch.zeros(6, device=device)
    assert x[2:].data_ptr() - x.data_ptr() == 8
    host = torch.mps._host_alias_storage(x.untyped_storage())
    assert host.nbytes() == 24 and host.device.type == "cpu"
    torch.empty(0).set_(host)[1] = 4
    assert x.tolist() == [0, 4, 0, 0, 0, 0]


def test_resize_and_set(device):
    x = torch.arange(4.0, device=device)
    x.resize_(2, 4)
    assert x[0].tolist() == [0, 1, 2, 3] and x.untyped_storage().nbytes() == 32
    y = torch.empty(0, device=device).set_(x.untyped_storage(), 1, (2,), (2,))
    assert y.tolist() == [1, 3]
    assert y.set_().numel() == 0
    with pytest.raises(RuntimeError, match="device"):
        y.set_(torch.ones(2).untyped_storage())


def test_uninitialised_memory_is_nan(device):
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.empty(3, device=device).isnan().all()
    assert torch.empty_strided((2, 2), (1, 2), dtype=torch.half, device=device).isnan().all()
    assert torch.zeros(1, device=device).resize_(3)[1:].isnan().all()


def test_poison_without_the_deterministic_switch(device, checked):
    torch.use_deterministic_algorithms(False)
    assert torch.empty(1000, device=device).isnan().all()


def test_memory_counters(device):
    before = torch.mps.current_allocated_memory()
    x = torch.empty(1000, device=device)
    assert torch.mps.current_allocated_memory() - before == 4000
    assert torch.mps.driver_allocated_memory() >= 4000
    assert torch.accelerator.max_memory_allocated() >= before + 4000
    del x
    torch.mps.empty_cache()
    assert torch.mps.current_allocated_memory() == before
    assert torch.mps.recommended_max_memory() > 2**30


def test_out_of_memory(device):
    torch.mps.set_per_process_memory_fraction(1e-9)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="MPS backend out of memory"):
            torch.empty(1000, device=device)
    finally:
        torch.mps.set_per_process_memory_fraction(0.0)
    torch.empty(1000, device=device)


def test_where_torch_looks_for_the_device(device):
    assert torch.backends.mps.is_available() and torch.backends.mps.is_built()
    assert torch.mps.is_available() and torch.mps.device_count() == 1
    assert torch.backends.mps.is_macos13_or_newer() and torch.backends.mps.get_core_count() > 0
    assert torch.backends.mps.get_name()
    assert torch.accelerator.current_accelerator().type == "mps"
    assert torch.get_device_module("mps") is torch.mps
    assert "mps:0" in repr(torch.ones(2, device=device))


def test_events(device):
    for event in (torch.mps.Event, lambda **kw: torch.Event("mps", **kw)):
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        torch.ones(10, device=device).sum()
        end.record()
        end.synchronize()
        assert end.query() and start.elapsed_time(end) > 0


RANDOM = {
    "rand": lambda **kw: torch.rand(50, **kw),
    "randn": lambda **kw: torch.randn(50, **kw),
    "randint": lambda **kw: torch.randint(1000, (50,), **kw),
    "randperm": lambda **kw: torch.randperm(50, **kw),
    "bernoulli": lambda **kw: torch.full((50,), 0.5, device="mps").bernoulli_(
        **{k: v for k, v in kw.items() if k == "generator"}),
    "multinomial": lambda **kw: torch.ones(50, device="mps").multinomial(
        50, **{k: v for k, v in kw.items() if k == "generator"}),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_follow_the_seed(device, name):
    draw = RANDOM[name]
    torch.manual_seed(7)
    first, second = draw(device=device), draw(device=device)
    assert not torch.equal(first, second)
    torch.mps.manual_seed(7)
    assert torch.equal(draw(device=device), first)
    generator = torch.Generator(device="mps").manual_seed(7)
    assert torch.equal(draw(device=device, generator=generator), first)
    assert generator.initial_seed() == 7


@pytest.mark.parametrize("drop", [
    lambda x: F.dropout(x, 0.5), lambda x: torch.native_dropout(x, 0.5, True)[0],
    lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
])
def test_dropout_follows_the_seed_of_mps(device, drop):
    x = torch.ones(1, 8, 16, device=device)
    torch.mps.manual_seed(3)
    first, second = drop(x), drop(x)
    torch.mps.manual_seed(3)
    torch.rand(5)
    assert torch.equal(drop(x), first) and not torch.equal(first, second)


def test_generator_state(device):
    generator = torch.Generator(device="mps").manual_seed(3)
    torch.rand(5, device=device, generator=generator)
    state = generator.get_state()
    expected = torch.rand(5, device=device, generator=generator)
    twin = generator.clone_state()
    generator.set_state(state)
    assert torch.equal(torch.rand(5, device=device, generator=generator), expected)
    assert torch.equal(torch.rand(5, device=device, generator=twin),
                       torch.rand(5, device=device, generator=generator))
    state = torch.mps.get_rng_state()
    expected = torch.rand(5, device=device)
    torch.mps.set_rng_state(state)
    assert torch.equal(torch.rand(5, device=device), expected)
    with pytest.raises(RuntimeError, match="Expected a 'mps' device type for generator"):
        torch.rand(5, device=device, generator=torch.Generator())


def test_random_numbers_leave_the_cpus_alone(device):
    torch.manual_seed(1)
    expected = torch.rand(5)
    torch.manual_seed(1)
    torch.rand(5, device=device)
    F.dropout(torch.ones(5, device=device))
    assert torch.equal(torch.rand(5), expected)


def test_save_load_copy(device):
    x = torch.randn(4, 6, device=device)[1:, ::2]
    file = io.BytesIO()
    torch.save({"x": x, "base": x._base}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded["x"].device.type == "mps" and torch.equal(loaded["x"], x)
    assert loaded["x"].untyped_storage().data_ptr() == loaded["base"].untyped_storage().data_ptr()
    file.seek(0)
    assert torch.equal(torch.load(file, map_location="cpu")["x"], x.cpu())
    file = io.BytesIO()
    torch.save(x.cpu(), file)
    file.seek(0)
    assert torch.equal(torch.load(file, map_location="mps"), x)
    assert torch.equal(pickle.loads(pickle.dumps(x)), x)
    twin = copy.deepcopy(x)
    twin.zero_()
    assert x.any() and not twin.any()


def test_threads(device):
    wrong = []

    def work(number):
        for _ in range(50):
            x = torch.full((16, 16), float(number), device=device, requires_grad=True)
            (x * x).sum().backward()
            if not torch.equal(x.grad, 2 * x):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_autograd_has_let_go_of_all_before_the_process_ends(simulator):
    """As long as its thread is in a hook, what is called at exit does not return."""
    in_hook, done = threading.Event(), threading.Event()

    def hook(gradient):
        in_hook.set()
        time.sleep(0.2)
        done.set()

    x = torch.ones(2, device="mps", requires_grad=True)
    x.register_hook(hook)
    thread = threading.Thread(target=lambda: x.sum().backward())
    thread.start()
    assert in_hook.wait(timeout=60)
    simulator._wait_for_autograd()
    assert done.is_set()
    thread.join(timeout=60)


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_import_of_the_package_changes_nothing():
    done = run_python("import torch, torch_flash_mps\n"
                      "assert not torch.backends.mps.is_available()\n"
                      "torch.empty(1, device='mps')")
    assert "with arguments from the 'MPS' backend" in done.stderr, done.stderr


def test_late_import():
    """Torch has looked for the device in vain, and has run a backward pass without it."""
    done = run_python(
        "import torch\n"
        "assert not torch.backends.mps.is_available() and not torch.accelerator.is_available()\n"
        "torch.ones(2, requires_grad=True).sum().backward()\n"
        "import torch_flash_mps.simulator\n"
        "assert torch.backends.mps.is_available() and torch.accelerator.is_available()\n"
        "x = torch.ones(2, device='mps', requires_grad=True)\n"
        "(3 * x).sum().backward()\n"
        "print(x.grad.tolist())")
    assert done.stdout.strip() == "[3.0, 3.0]", done.stderr


def test_controls(simulator):
    simulator.reset_counters()
    assert simulator.counters() == []
    assert simulator.stats()["bytes_allocated"] >= 0
    module = simulator._module
    before = module.checks_enabled()
    with simulator.checks(not before):
        assert module.checks_enabled() is not before
    assert module.checks_enabled() is before
    simulator.shuffle(5)
    assert module.shuffle_seed() == 5
    simulator.shuffle(None)
    assert module.shuffle_seed() is None
