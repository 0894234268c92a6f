"""What every test gets: an `mps` device, a seed, and uninitialised memory full of NaN.

A test says `device` and does not know whether it runs on an Apple GPU or on the simulated device
(Linux). Nothing is skipped on the simulated device: a skipped test makes the run fail.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

SKIP_BUDGET = 0

# Models come from installed packages; a test that asks a network for one is wrong.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Tests work on small tensors: waking another thread costs more than it saves, many times over on a
# busy machine. The simulated device has threads of its own.
torch.set_num_threads(1)


def has_real_gpu() -> bool:
    return sys.platform == "darwin"


@pytest.fixture(scope="session")
def simulator():
    """The module `torch_flash_mps.simulator`, its checks off, or None on a Mac."""
    if has_real_gpu():
        return None
    import torch_flash_mps.simulator

    torch_flash_mps.simulator.checks(False)
    return torch_flash_mps.simulator


@pytest.fixture
def device(simulator) -> Iterator[torch.device]:
    """The `mps` device; a fault that the test left behind on it fails the test."""
    yield torch.device("mps")
    torch.mps.synchronize()


@pytest.fixture(params=["cpu", "mps"])
def place(request) -> torch.device:
    """Both kinds of tensors that the op takes, one after the other."""
    return torch.device("cpu") if request.param == "cpu" else request.getfixturevalue("device")


@pytest.fixture
def checked(device, simulator, seed) -> Iterator[None]:
    """Runs the test's kernels with every check of the simulated device and in a shuffled order."""
    if simulator is None:
        yield
        return
    simulator.shuffle(seed)
    try:
        with simulator.checks():
            yield
    finally:
        simulator.shuffle(None)


@pytest.fixture
def on_family(device, simulator):
    """Sets the GPU family that the simulated device answers with, for one test."""
    if simulator is None:
        from torch_flash_mps._extension import extension

        yield lambda family: extension().gpu_family() == int(family.removeprefix("apple"))
        return
    from torch_flash_mps import _simulator

    before = _simulator.gpu_family()

    def switch(family: str) -> bool:
        _simulator.set_gpu_family(family)
        return True

    yield switch
    _simulator.set_gpu_family(before)


@pytest.fixture
def on_cores(device, simulator):
    """Sets how many cores the simulated GPU has, for one test."""
    from torch_flash_mps._extension import extension

    before = extension().gpu_cores()
    if simulator is None:
        yield lambda cores: before == cores
        return

    def switch(cores: int) -> bool:
        simulator.set_gpu_cores(cores)
        return True

    yield switch
    simulator.set_gpu_cores(before)


@pytest.fixture
def kernels(device, simulator) -> Callable[[], list[str]]:
    """A function: the ops whose kernels ran since it was last called, in order."""
    if simulator is None:
        pytest.skip("kernels are counted by the simulated device")

    def ran() -> list[str]:
        names = [row["kernel"] for row in simulator.counters()]
        simulator.reset_counters()
        return [re.sub(r"_(f32|f16|bf16)_.*", "", name) for name in names]

    ran()
    return ran


@pytest.fixture(autouse=True)
def seed(request) -> int:
    """Seeds torch with a number that depends on the test's name only."""
    number = sum(ord(letter) << (index % 16) for index, letter in enumerate(request.node.nodeid))
    torch.manual_seed(number)
    return number


@pytest.fixture(autouse=True)
def _nan_in_uninitialised_memory() -> Iterator[None]:
    """An element that a kernel forgets to write must show, so at::empty fills itself with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    skipped = len(terminalreporter.stats.get("skipped", []))
    if _over_budget(terminalreporter):
        terminalreporter.section("skip budget")
        terminalreporter.write_line(
            f"{skipped} tests were skipped on the simulated device; the budget is {SKIP_BUDGET}"
        )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if exitstatus == pytest.ExitCode.OK and reporter is not None and _over_budget(reporter):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _over_budget(reporter) -> bool:
    return not has_real_gpu() and len(reporter.stats.get("skipped", [])) > SKIP_BUDGET
