"""The parameter block as the Metal compiler lays it out against the host's."""

import sys
from pathlib import Path

import numpy as np
import torch

from torch_flash_mps._extension import extension

CONTRACT = Path(__file__).resolve().parent.parent / "metal" / "attn_params.h"

# An address in constant memory may not be null, so offsets are taken from a bound block.
KERNEL = """
using flash_mps::AttnParams;

kernel void layout(constant AttnParams& params [[buffer(0)]], device int* result [[buffer(1)]]) {{
  const constant char* base = reinterpret_cast<const constant char*>(&params);
  result[0] = int(sizeof(AttnParams));
  {offsets}
}}
"""


def test_params_lie_alike_on_host_and_gpu(device):
    host = extension().params_layout()
    fields = [name for name in host if name != "sizeof"]
    assert len(fields) > 5
    offsets = "\n  ".join(
        f"result[{index}] = int(reinterpret_cast<const constant char*>(&params.{name}) - base);"
        for index, name in enumerate(fields, start=1)
    )
    header = CONTRACT.read_text().replace("#pragma once", "")
    source = header + KERNEL.format(offsets=offsets)
    result = _run(source, bytes(host["sizeof"]), len(fields) + 1)
    assert dict(zip(["sizeof", *fields], result, strict=True)) == dict(host)


def _run(source: str, params: bytes, count: int) -> list[int]:
    if sys.platform == "darwin":
        block = torch.frombuffer(bytearray(params), dtype=torch.uint8).to("mps")
        out = torch.full((count,), -1, dtype=torch.int32, device="mps")
        torch.mps.compile_shader(source).layout(block, out, threads=[1, 1, 1])
        return out.tolist()
    from torch_flash_mps import _simulator

    out = np.full(count, -1, dtype=np.int32)
    kernel = _simulator.Library(source).kernel("layout")
    kernel(params, out, grid=(1, 1, 1), threadgroup=(1, 1, 1))
    return out.tolist()
