"""What the tests of the simulated device share."""

from collections.abc import Iterator

import pytest
import shaders
from recording import SOURCE

pytest.register_assert_rewrite("planted")


@pytest.fixture(scope="module")
def checked_metal(simulator) -> Iterator:
    """The native module, its checks on; a fault that nobody has taken fails the module."""
    from torch_flash_mps import _simulator

    before = _simulator.checks_enabled()
    _simulator.set_checks(True)
    yield _simulator
    _simulator.set_checks(before)
    assert list(iter(_simulator.take_fault, None)) == []


@pytest.fixture(scope="module")
def library(checked_metal):
    return checked_metal.Library(SOURCE)


@pytest.fixture(scope="module")
def add(library):
    return library.kernel("add", {0: ("int", 3), 1: ("bool", False)})


@pytest.fixture(scope="module")
def copy(library):
    return library.kernel("copy", {0: ("int", 0), 1: ("bool", False)})


@pytest.fixture(scope="module")
def shared_sum(library):
    return library.kernel("shared_sum", {0: ("int", 0), 1: ("bool", False)})


@pytest.fixture
def metal(checked_metal) -> Iterator:
    """The native module, its checks on; a fault that the test has not taken fails it."""
    yield checked_metal
    assert list(iter(checked_metal.take_fault, None)) == []


@pytest.fixture(params=shaders.FLAVOURS[:1] if shaders.ON_MAC else shaders.FLAVOURS)
def flavour(request, simulator) -> Iterator[str]:
    """Runs a test of what Metal itself says: plain, and with checks and in a shuffled order."""
    if shaders.ON_MAC:
        yield request.param
        return
    is_checked = request.param == "checked"
    simulator.shuffle(7 if is_checked else None)
    with simulator.checks(is_checked):
        yield request.param
    simulator.shuffle(None)
