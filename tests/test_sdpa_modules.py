"""`enable_sdpa` below PyTorch's own modules (IN-10)."""

import pytest
import torch
from sdpa_support import close
from torch import nn

from torch_flash_mps import sdpa_enabled


def mha(device, heads=1, dropout=0.0):
    torch.manual_seed(0)
    return nn.MultiheadAttention(64, heads, dropout=dropout, batch_first=True).to(device)


MASKS = {
    "none": {},
    "causal": {"attn_mask": torch.ones(9, 9).triu(1).bool()},
    "causal hint": {"attn_mask": torch.ones(9, 9).triu(1).bool(), "is_causal": True},
    "padding": {"key_padding_mask": torch.arange(9) >= torch.tensor([[9], [4]])},
    "both": {"attn_mask": torch.ones(9, 9).triu(1).bool(),
             "key_padding_mask": torch.arange(9) >= torch.tensor([[9], [4]])},
    "per head": {"attn_mask": torch.randn(2, 9, 9)},
}


@pytest.mark.parametrize("name", MASKS)
def test_IN_10_multihead_attention_equals_the_cpu(name, device, kernels):
    x = torch.randn(2, 9, 64)
    layer, twin = mha(device).eval(), mha("cpu").eval()
    on_device = {key: value.to(device) if isinstance(value, torch.Tensor) else value
                 for key, value in MASKS[name].items()}
    moved = x.to(device).requires_grad_()
    expected, _ = twin(x, x, x, need_weights=False, **MASKS[name])
    with sdpa_enabled():
        out, weights = layer(moved, moved, moved, need_weights=False, **on_device)
        out.square().sum().backward()
    assert weights is None
    close(out, expected)
    assert kernels()[0] == "flash_fwd"
    twin(x.requires_grad_(), x, x, need_weights=False, **MASKS[name])[0].square().sum().backward()
    close(moved.grad, x.grad, atol=1e-5, rtol=1e-4)


def test_IN_10_lstm_then_attention_with_dropout_trains(device, kernels):
    """In train mode with dropout, in eval mode without; both are finite."""
    torch.manual_seed(0)
    lstm = nn.LSTM(8, 64, batch_first=True).to(device)
    layer = mha(device, dropout=0.1).train()
    x = torch.randn(2, 9, 8).to(device)
    hidden = torch.ones(9, 9, device=device).triu(1).bool()
    with sdpa_enabled():
        features, _ = lstm(x)
        out, _ = layer(features, features, features, attn_mask=hidden, need_weights=False)
        out.square().mean().backward()
        assert kernels()[0] == "flash_fwd"
        layer.eval()
        again, _ = layer(features, features, features, attn_mask=hidden, need_weights=False)
        assert kernels() == ["flash_fwd"]
    weights = [*lstm.parameters(), *layer.parameters()]
    assert all(torch.isfinite(weight.grad).all() for weight in weights)
    assert torch.isfinite(out).all() and torch.isfinite(again).all()


def test_transformer_encoder_layer(device, kernels):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    x, padding = torch.randn(2, 7, 32), torch.arange(7) >= torch.tensor([[7], [5]])
    expected = layer(x, src_key_padding_mask=padding)
    with sdpa_enabled():
        got = layer.to(device)(x.to(device), src_key_padding_mask=padding.to(device))
    close(got, expected)
    assert kernels() == ["flash_fwd"]
