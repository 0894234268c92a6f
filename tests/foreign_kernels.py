"""Attention kernels that others wrote, run unchanged on the simulated device.

PyTorch's come as Metal text with the installed torch, MLX's with its macOS wheel. Their host code
does not, so the parameters that it would fill in are packed here. Shapes as in the op: query
`[B, Hq, Sq, D]`, key and value `[B, Hkv, Sk, D]`, contiguous and on the CPU; mask
`[B, Hq, Sq, Sk]`, bool with True = visible, or query's dtype for the kernels for few query rows. It
may be expanded: dimensions of stride 0 are bound as they are. PyTorch aligns causal masks top-left,
MLX bottom-right.
"""

import functools
import math
import re
import struct
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor
from torch.utils._cpp_embed_headers import embed_headers
from wheels import wheel_folder

from torch_flash_mps import simulator

TORCH_PREAMBLE = """\
#include <metal_stdlib>
#include <metal_simdgroup>
#include <c10/metal/utils.h>
using namespace metal;
"""
TORCH_KERNELS = "ATen/native/mps/kernels"
MLX_KERNELS = "mlx/backend/metal/kernels"
MLX_PREAMBLE = f'#include <metal_stdlib>\n#include "{MLX_KERNELS}/utils.h"\n'

MSL_NAMES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}
DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
# Rows and columns of a tile by head_dim, in PyTorch's prefill and MLX's steel attention alike.
TILES = {64: (32, 32), 128: (32, 16)}
NUM_SIMDGROUPS = 4
VECTOR_THREADS = 1024   # of the threadgroups of the vector kernels: 32 simdgroups, a key each
NUM_SPLITS = 32         # of the keys in the two-pass vector kernels
# Query heads of one KV head that a simdgroup of MLX's sharing kernel takes, by head_dim.
SHARED_HEADS = {64: 8, 128: 4}
SHARING_GROUP = 8       # query heads on one KV head, for that kernel
UNUSED = bytes(16)      # bound where a kernel declares a parameter and does not read it


def torch_prefill(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """PyTorch's prefill kernel (PrefillAttention.h)."""
    batch, heads, seqlen_q, dim = q.shape
    block_q, block_k = TILES[dim]
    out = _empty_out(q)
    dtype = DTYPE_NAMES[q.dtype]
    kernel = (
        f"prefill_attention_{dtype}_bq{block_q}_bk{block_k}_bd{dim}_wm{NUM_SIMDGROUPS}_wn1"
        f"_hm{int(mask is not None)}_dc{int(causal)}_mask{dtype if mask is None else 'bool_'}"
    )
    softcapping = 1.0   # off
    params = struct.pack(
        "<6i2f12i", batch, heads, dim, seqlen_q, k.shape[2], heads // k.shape[1], _scale(q),
        softcapping, *(stride for x in (q, k, v, out) for stride in x.stride()[:3]),
    )
    mask_params = UNUSED if mask is None else struct.pack("<4i", *mask.stride())
    arguments = (q, k, v, out, params, mask_params, UNUSED if mask is None else mask)
    _run(_torch_source("PrefillAttention.h"), kernel, arguments,
         (-(-seqlen_q // block_q), heads, batch), (32, NUM_SIMDGROUPS, 1))
    return out


def torch_decode(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False,
    passes: int = 1, is_mended: bool = False,
) -> Tensor:
    """PyTorch's kernels for few query rows (DecodeAttention.h), in one pass or two.

    The first of two passes has a race, which ends a kernel in checked mode: all lanes of a
    simdgroup store the same two values. Where `is_mended`, one lane does.
    """
    batch, heads, seqlen_q, dim = q.shape
    source, msl = _torch_source("DecodeAttention.h"), MSL_NAMES[q.dtype]
    if is_mended:
        source, num_mended = re.subn(r"if \(simd_gid == 0\)(?= {\s+sums\[0\])",
                                     "if (simd_gid == 0 && simd_lid == 0)", source)
        assert num_mended == 1, f"expected the race once, found it {num_mended} times"
    kind = "masknone_causal" if causal else "masknone"
    if mask is not None:
        kind = f"mask{MSL_NAMES.get(mask.dtype, 'bool')}"
    suffix = f"{msl}_{dim}_{dim}_{kind}"
    aggregation = f"sdpa_vector_2pass_2_{msl}_{dim}"
    options = [
        struct.pack("<I", heads // k.shape[1]),
        struct.pack("<I", k.shape[2]),
        _uint4(q.stride(1), k.stride(1), v.stride(1)),
        _uint4(q.stride(2), k.stride(2), v.stride(2)),
        struct.pack("<f", _scale(q)),
        UNUSED if mask is None else mask,
        UNUSED if mask is None else _uint4(*reversed(mask.stride())),
        _uint4(q.stride(0), k.stride(0), v.stride(0), heads),
    ]
    out, rows = _empty_out(q), (batch * heads, seqlen_q)
    if passes == 1:
        _run(source, f"sdpa_vector_{suffix}", (q, k, v, out, *options),
             (*rows, 1), (VECTOR_THREADS, 1, 1))
        return out
    partial = _Partials(q)
    _run(source, f"sdpa_vector_2pass_1_{suffix}",
         (q, k, v, partial.out, partial.sums, partial.maxs, *options),
         (*rows, NUM_SPLITS), (8 * 32, 1, 1))
    _run(source, aggregation, (partial.out, partial.sums, partial.maxs, out), (*rows, 1),
         (VECTOR_THREADS, 1, 1))
    return out


def mlx_steel(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """MLX's steel attention (steel_attention.h)."""
    batch, heads, seqlen_q, dim = q.shape
    seqlen_k = k.shape[2]
    block_q, block_k = TILES[dim]
    out = _empty_out(q)
    params = struct.pack(
        "<6if7i12q", batch, heads, dim, seqlen_q, seqlen_k, heads // k.shape[1], _scale(q),
        -(-seqlen_q // block_q), -(-seqlen_k // block_k), seqlen_q // block_q, seqlen_k // block_k,
        seqlen_q % block_q, seqlen_k % block_k, seqlen_k - seqlen_q,
        *(stride for x in (q, k, v, out) for stride in x.stride()[:3]),
    )
    arguments = [q, k, v, out, params]
    if mask is not None:
        arguments += [struct.pack("<3q", *mask.stride()[:3]), mask]
    constants = {
        200: seqlen_q % block_q == 0, 201: seqlen_k % block_k == 0, 300: mask is not None,
        301: causal, 302: False, 303: False,
    }
    instance = (f"attention, {MSL_NAMES[q.dtype]}, {block_q}, {block_k}, {dim}, {dim}, "
                f"{NUM_SIMDGROUPS}, 1, bool, float")
    _run(_mlx_source("steel/attn/kernels/steel_attention.h", instance), "instance", arguments,
         (-(-seqlen_q // block_q), heads, batch), (32, NUM_SIMDGROUPS, 1), constants)
    return out


def mlx_vector(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False,
    passes: int = 1, is_sharing: bool = False,
) -> Tensor:
    """MLX's kernels for few query rows (sdpa_vector.h), in one pass or two.

    `is_sharing` takes the first pass that reads K and V for several heads at once: one query row,
    no mask, `SHARING_GROUP` heads on one KV head.
    """
    batch, heads, seqlen_q, dim = q.shape
    heads_kv, msl = k.shape[1], MSL_NAMES[q.dtype]
    group_size = heads // heads_kv
    has_mask = mask is not None
    is_bool = has_mask and mask.dtype == torch.bool
    constants = {20: has_mask, 21: False, 22: causal, 23: is_bool, 24: has_mask and not is_bool,
                 25: False, 26: NUM_SPLITS}
    sizes = [
        struct.pack("<i", k.shape[2]),
        *(struct.pack("<Q", stride) for x in (k, v) for stride in x.stride()[1:3]),
        struct.pack("<f", _scale(q)),
    ]
    masks = [mask, None] if is_bool else [None, mask]
    if has_mask:
        masks += [struct.pack("<i", mask.stride(axis)) for axis in (3, 2, 1)]
    out, rows = _empty_out(q), (batch * heads, seqlen_q, 1)
    if passes == 1:
        _run(_mlx_source("sdpa_vector.h", f"sdpa_vector, {msl}, {dim}, {dim}"), "instance",
             (q, k, v, out, struct.pack("<i", group_size), *sizes, *masks), rows,
             (VECTOR_THREADS, 1, 1), constants)
        return out
    partial = _Partials(q)
    first = f"sdpa_vector_2pass_1, {msl}, {dim}, {dim}"
    if is_sharing:
        first = (f"sdpa_vector_2pass_1_gqa, {msl}, {dim}, {dim}, {SHARING_GROUP}, "
                 f"{SHARED_HEADS[dim]}")
    _run(_mlx_source("sdpa_vector.h", first), "instance",
         (q, k, v, partial.out, partial.sums, partial.maxs, None, *sizes, *masks),
         (heads_kv, batch, NUM_SPLITS), (32, group_size, seqlen_q), constants)
    _run(_mlx_source("sdpa_vector.h", f"sdpa_vector_2pass_2, {msl}, {dim}"), "instance",
         (partial.out, partial.sums, partial.maxs, out, struct.pack("<i", NUM_SPLITS)),
         rows, (VECTOR_THREADS, 1, 1), constants)
    return out


class _Partials:
    """What the first of two passes leaves for each row and split."""

    def __init__(self, q: Tensor) -> None:
        rows = math.prod(q.shape[:3])
        self.out = q.new_full((rows, NUM_SPLITS, q.shape[3]), math.nan)
        self.sums = torch.full((rows, NUM_SPLITS), math.nan)
        self.maxs = torch.full((rows, NUM_SPLITS), math.nan)


def _scale(q: Tensor) -> float:
    return 1 / math.sqrt(q.shape[3])


def _empty_out(q: Tensor) -> Tensor:
    return torch.full_like(q, math.nan)


def _uint4(*values: int) -> bytes:
    """Also a uint3, which is as large."""
    return struct.pack("<4I", *values, *(0,) * (4 - len(values)))


@functools.cache
def _torch_source(header: str) -> str:
    include = Path(torch.__file__).parent / "include"
    return _flattened(f"{TORCH_PREAMBLE}#include <{TORCH_KERNELS}/{header}>\n", include)


@functools.cache
def _mlx_source(header: str, instance: str) -> str:
    """The header, and one instance of a kernel template, named as MLX's own macro names it."""
    include = wheel_folder("mlx-metal") / "mlx" / "include"
    text = _flattened(f'{MLX_PREAMBLE}#include "{MLX_KERNELS}/{header}"\n', include)
    return f'{text}\ninstantiate_kernel("instance", {instance})\n'


def _flattened(text: str, include: Path) -> str:
    """`text` with every header of `include` in the place of its #include."""
    with tempfile.NamedTemporaryFile("w", suffix=".metal") as file:
        file.write(text)
        file.flush()
        return embed_headers(file.name, [include])


def _run(
    source: str,
    function: str,
    arguments: Sequence[Tensor | bytes | None],
    threadgroups: tuple[int, int, int],
    threads: tuple[int, int, int],
    constants: Mapping[int, bool | int] = MappingProxyType({}),
) -> None:
    """Runs one kernel to its end; argument i is bound at slot i, None not at all."""
    kernel = _kernel(source, function, tuple(constants.items()), simulator.checks_enabled())
    kernel(
        *((x.data_ptr(), _stored_bytes(x)) if isinstance(x, Tensor) else x for x in arguments),
        grid=threadgroups, threadgroup=threads,
    )


def _stored_bytes(x: Tensor) -> int:
    """From the first element of a tensor, which may be expanded, to the last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


@functools.cache
def _kernel(source: str, function: str, constants: tuple[tuple[int, bool | int], ...], checked):
    """`checked` is what the kernel is built for: a built kernel stays as it is."""
    values = {index: ("bool" if isinstance(value, bool) else "int", value)
              for index, value in constants}
    return _library(source).kernel(function, values)


@functools.cache
def _library(source: str):
    return simulator.Library(source)
