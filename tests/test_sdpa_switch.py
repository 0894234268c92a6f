"""Who switches sdpa on and off: `enable_sdpa`, `sdpa_enabled`, threads, PyTorch's registry."""

import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from sdpa_support import close, dispatch_tables, inputs
from torch.nn import attention as torch_attention

from torch_flash_mps import disable_sdpa, enable_sdpa, sdpa_enabled
from torch_flash_mps.sdpa import IMPL_NAME


@pytest.fixture(autouse=True)
def restored():
    """Whatever a test switches on, PyTorch's own kernels are back after it."""
    before = dispatch_tables()
    yield
    disable_sdpa()
    assert dispatch_tables() == before


def is_on(kernels) -> bool:
    q = torch.ones(1, 1, 2, 8, device="mps")
    F.scaled_dot_product_attention(q, q, q)
    return kernels() == ["flash_decode"]


def test_IN_09_repeated(kernels):
    for _ in range(2):
        enable_sdpa()
        enable_sdpa()
        assert is_on(kernels)
        disable_sdpa()
        assert not is_on(kernels)
        disable_sdpa()
        assert not is_on(kernels)


def test_IN_09_nested(kernels):
    with sdpa_enabled():
        with sdpa_enabled():
            assert is_on(kernels)
        assert is_on(kernels)
        enable_sdpa()
    assert is_on(kernels)
    with sdpa_enabled():
        disable_sdpa()
        assert is_on(kernels)
    assert not is_on(kernels)


def test_an_exception_leaves_the_block(kernels):
    with pytest.raises(ZeroDivisionError), sdpa_enabled():
        raise ZeroDivisionError
    assert not is_on(kernels)


def test_disable_says_who_else_holds_it():
    with sdpa_enabled(), pytest.raises(RuntimeError, match=r"1 x sdpa_enabled\(\)"):
        disable_sdpa()


def test_IN_09_threads(device, kernels):
    """Several threads call and switch at once: every call is ours or PyTorch's, and right."""
    q, k, v = inputs(device, 1, 1, 4, 8)
    expected = F.scaled_dot_product_attention(q.cpu(), k.cpu(), v.cpu())
    failures = []

    def work():
        try:
            for _ in range(50):
                with sdpa_enabled(), torch.no_grad():
                    close(F.scaled_dot_product_attention(q, k, v), expected)
                with torch.no_grad():
                    close(F.scaled_dot_product_attention(q, k, v), expected)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(kernels()) >= 200
    assert not is_on(kernels)


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has a Metal device")
@pytest.mark.parametrize("call", ["enable_sdpa()", "sdpa_enabled().__enter__()"])
def test_no_metal_device_is_an_error(call):
    done = subprocess.run(
        [sys.executable, "-c", f"import torch_flash_mps as package; package.{call}"],
        capture_output=True, text=True,
    )
    assert done.returncode == 1
    assert "expected a Metal device, found none: Linux has no Metal device" in done.stderr


def test_pytorchs_registry(kernels):
    assert IMPL_NAME in torch_attention.list_flash_attention_impls()
    assert not is_on(kernels)
    torch_attention.activate_flash_attention_impl(IMPL_NAME)
    try:
        assert torch_attention.current_flash_attention_impl() == IMPL_NAME
        assert is_on(kernels)
        with pytest.raises(RuntimeError, match="restore_flash_attention_impl"):
            disable_sdpa()
        torch_attention.activate_flash_attention_impl(IMPL_NAME)
        assert is_on(kernels)
    finally:
        torch_attention.restore_flash_attention_impl()
    assert not is_on(kernels)
