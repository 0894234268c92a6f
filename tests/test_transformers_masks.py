"""What transformers pads is not visited."""

import pytest
import torch
from tiny_models import fused, tiny


def _products(simulator, model, device, tokens, mask=None):
    simulator.reset_counters()
    with torch.no_grad():
        out = model(tokens.to(device), attention_mask=None if mask is None else mask.to(device))
    found = [row for row in simulator.counters() if row["kernel"].startswith("flash_fwd")]
    return out.last_hidden_state, sum(row["matrix_products"] for row in found)


def test_a_padded_batch_visits_fewer_blocks(device, simulator):
    """An encoder and two texts of 512 and 130 tokens: 16 and 5 blocks of 32 keys."""
    if simulator is None:
        pytest.skip("products are counted by the simulated device")
    model = tiny("bert", hidden_size=768, num_attention_heads=12, num_hidden_layers=1,
                 max_position_embeddings=512).half()
    tokens = torch.randint(1, 97, (2, 512))
    mask = torch.ones(2, 512, dtype=torch.long)
    mask[1, 130:] = 0
    model = fused(model, device)
    padded, visited = _products(simulator, model, device, tokens, mask)
    whole, dense = _products(simulator, model, device, tokens)
    assert visited == dense * (16 + 5) // 32
    alone, _ = _products(simulator, model, device, tokens[1:, :130])
    torch.testing.assert_close(padded[0], whole[0], atol=4e-3, rtol=0)
    torch.testing.assert_close(padded[1:, :130], alone, atol=4e-3, rtol=0)
