"""Work that is split over several dispatches, and offsets that do not fit into 32 bits."""

import os
import subprocess
import sys

import pytest
import torch
from checks import check_exact

from torch_flash_mps import attention, explain
from torch_flash_mps.reference import attention_ref

SPLIT = """
import sys
import torch
if sys.platform == "linux":
    import torch_flash_mps.simulator
import torch_flash_mps
torch.manual_seed(0)
is_causal, head_dim = sys.argv[1] == "causal", int(sys.argv[2])
operands = [torch.randn(2, 3, 150, head_dim) for _ in range(3)]
on_device = [operand.to("mps") for operand in operands]
out, lse = torch_flash_mps.attention(*on_device, is_causal=is_causal, return_lse=True)
plan = torch_flash_mps.explain(*on_device, is_causal=is_causal)
torch.save((operands, out.cpu(), lse.cpu(), plan["num_dispatches"], plan["num_q_blocks"]),
           sys.argv[3])
"""


@pytest.mark.parametrize(("kind", "head_dim"), [("dense", 24), ("causal", 24), ("causal", 296)])
def test_HD_13_split_work_gives_the_same_result(tmp_path, kind, head_dim):
    result = tmp_path / "result.pt"
    limit = {"TORCH_FLASH_MPS_MAX_DISPATCH_FLOP": "2e6" if head_dim == 24 else "4e7"}
    subprocess.run([sys.executable, "-c", SPLIT, kind, str(head_dim), str(result)], check=True,
                   env={**os.environ, **limit})
    operands, out, lse, num_dispatches, num_q_blocks = torch.load(result)
    assert 2 < num_dispatches <= num_q_blocks
    expected, expected_lse = attention_ref(*operands, is_causal=kind == "causal")
    check_exact(out, expected, 1e-5)
    check_exact(lse, expected_lse, 1e-5)


@pytest.mark.parametrize("operand", range(3), ids=["query", "key", "value"])
def test_HD_11_offsets_beyond_2_to_the_31_elements(device, operand):
    # Left uninitialised and hardly touched: 4 GiB of addresses.
    torch.utils.deterministic.fill_uninitialized_memory = False
    batch_stride = 2**31 + 64
    shape, strides = (2, 1, 4, 8), (batch_stride, 32, 8, 1)
    operands = [torch.randn(shape, dtype=torch.float16) for _ in range(3)]
    on_device = [x.to(device) for x in operands]
    far = torch.empty(batch_stride + 32, dtype=torch.float16, device=device)
    on_device[operand] = far.as_strided(shape, strides).copy_(operands[operand])
    assert explain(*on_device)["kernel"]
    expected, _ = attention_ref(*operands)
    check_exact(attention(*on_device), expected, 2e-3)
