"""Training allocates what it gives and what it needs again, and nothing that grows as seqlen²."""

import pytest
import torch

import torch_flash_mps

SEQLEN = 4096


def peak_of(call) -> int:
    """The most bytes that lived at one time during the call, above those that lived before it."""
    torch.mps.synchronize()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    result = call()
    torch.mps.synchronize()
    peak = torch.accelerator.max_memory_allocated() - before
    del result
    return peak


@pytest.mark.parametrize("causal", (False, True), ids=("dense", "causal"))
def test_BW_12_backward_memory_is_linear_in_seqlen(device, causal):
    q, k, v = (torch.randn(1, 1, SEQLEN, 8, device=device, requires_grad=True) for _ in range(3))
    grad_out = torch.randn_like(q)

    def train() -> tuple[torch.Tensor, ...]:
        out = torch_flash_mps.attention(q, k, v, is_causal=causal)
        return out, *torch.autograd.grad(out, (q, k, v), grad_out)

    out_and_gradients = 4 * q.nbytes
    lse_and_delta = 2 * SEQLEN * 4
    assert peak_of(train) <= out_and_gradients + lse_and_delta


def test_BW_12_the_peak_would_show_a_score_matrix(device):
    q = torch.randn(1, 1, 512, 8, device=device)
    assert peak_of(lambda: torch.softmax(q @ q.mT, -1) @ q) >= 512 * 512 * 4


def test_BW_12_gradient_of_a_broadcast_bias_has_the_size_of_the_bias(device):
    seqlen = 1024
    q, k, v = (torch.randn(1, 2, seqlen, 8, device=device) for _ in range(3))
    bias = torch.randn(1, 1, 1, seqlen, device=device, requires_grad=True)

    def train() -> tuple[torch.Tensor, ...]:
        out = torch_flash_mps.attention(q, k, v, attn_mask=bias)
        return out, *torch.autograd.grad(out, (bias,), torch.ones_like(out))

    out_and_its_gradient = 2 * q.nbytes
    lse_and_delta = 2 * 2 * seqlen * 4
    assert peak_of(train) <= out_and_its_gradient + lse_and_delta + bias.nbytes
