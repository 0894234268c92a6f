"""Metal kernels of others, which Apple's compiler accepts, run unchanged and give right results.

If one of them fails, the simulated device is no Metal device: none was written with it in mind.
"""

import itertools
import sys

import pytest
import torch

if sys.platform == "darwin":
    pytest.skip("a Mac has Metal itself", allow_module_level=True)

import foreign_kernels
from checks import attention_lowp, check
from torch import Tensor
from wheels import wheel_folder

from build_support.mac_wheels import WheelUnavailable
from torch_flash_mps.reference import attention_ref, visible_pairs

# Each dtype meets each kind of visibility, and each of those meets both head_dims.
KINDS = ("dense", "causal", "bool")
CASES = [
    pytest.param(dtype, kind, (64, 128)[(row + column) % 2], id=f"{name}-{kind}")
    for (row, (dtype, name)), (column, kind) in itertools.product(
        enumerate(foreign_kernels.DTYPE_NAMES.items()), enumerate(KINDS))
]
PASSES = pytest.mark.parametrize("passes", (1, 2))


@pytest.fixture(scope="module")
def mlx() -> None:
    try:
        wheel_folder("mlx-metal")
    except WheelUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def shuffled(simulator, seed):
    """Kernels without checks, which are quick; their threads still run in a shuffled order."""
    simulator.shuffle(seed)
    yield
    simulator.shuffle(None)


def operands(dtype, dim: int, seqlen_q: int, seqlen_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two batches, four query heads on two KV heads."""
    return (torch.randn(2, 4, seqlen_q, dim, dtype=dtype),
            torch.randn(2, 2, seqlen_k, dim, dtype=dtype),
            torch.randn(2, 2, seqlen_k, dim, dtype=dtype))


def judge(kernel, q, k, v, kind: str, causal_offset: int = 0, **options) -> None:
    """Runs a kernel with its own notion of causal, and compares with what that notion means."""
    visible = None
    if kind == "causal":
        visible = visible_pairs(q.shape[2], k.shape[2], is_causal=True, causal_offset=causal_offset)
    elif kind == "bool":
        visible = torch.rand(2, 4, q.shape[2], k.shape[2]) < 0.7
        visible[..., 0] = True   # what a row without keys gives is each kernel's own affair
    mask = visible if kind == "bool" else None
    out = kernel(q, k, v, mask, kind == "causal", **options)
    ref, _ = attention_ref(q, k, v, attn_mask=visible)
    check(out, ref, attention_lowp(q, k, v, attn_mask=visible))


@pytest.mark.parametrize("dtype, kind, dim", CASES)
def test_torch_prefill(checked, dtype, kind, dim):
    q, k, v = operands(dtype, dim, seqlen_q=75, seqlen_k=51)
    judge(foreign_kernels.torch_prefill, q, k, v, kind)


@PASSES
@pytest.mark.parametrize("dtype, kind, dim", CASES)
def test_torch_decode(shuffled, dtype, kind, dim, passes):
    q, k, v = operands(dtype, dim, seqlen_q=3, seqlen_k=301)
    judge(foreign_kernels.torch_decode, q, k, v, kind, passes=passes)


@pytest.mark.usefixtures("mlx")
@pytest.mark.parametrize("dtype, kind, dim", CASES)
def test_mlx_steel(checked, dtype, kind, dim):
    q, k, v = operands(dtype, dim, seqlen_q=51, seqlen_k=75)
    judge(foreign_kernels.mlx_steel, q, k, v, kind, causal_offset=75 - 51)


@pytest.mark.usefixtures("mlx")
@PASSES
@pytest.mark.parametrize("dtype, kind, dim", CASES)
def test_mlx_vector(shuffled, dtype, kind, dim, passes):
    q, k, v = operands(dtype, dim, seqlen_q=3, seqlen_k=301)
    judge(foreign_kernels.mlx_vector, q, k, v, kind, causal_offset=301 - 3, passes=passes)


@pytest.mark.usefixtures("mlx")
@PASSES
@pytest.mark.parametrize("kernel", (foreign_kernels.torch_decode, foreign_kernels.mlx_vector))
@pytest.mark.parametrize("kind", ("keys", "float"))
def test_vector_kernels_take_expanded_masks(shuffled, kernel, kind, passes):
    q, k, v = operands(torch.float16, 64, seqlen_q=2, seqlen_k=67)
    mask = torch.randn(2, 4, 1, 67, dtype=q.dtype)
    if kind == "keys":
        mask = torch.arange(67).expand(1, 1, 1, 67) >= 5
    out = kernel(q, k, v, mask.expand(2, 4, 2, 67), passes=passes)
    check(out, attention_ref(q, k, v, attn_mask=mask)[0], attention_lowp(q, k, v, attn_mask=mask))


@pytest.mark.usefixtures("mlx")
@pytest.mark.parametrize("dim", (64, 128))
def test_mlx_vector_that_shares_keys(checked, dim):
    q, k, v = operands(torch.float16, dim, seqlen_q=1, seqlen_k=301)
    q = q.repeat_interleave(foreign_kernels.SHARING_GROUP // 2, 1)
    judge(foreign_kernels.mlx_vector, q, k, v, "dense", passes=2, is_sharing=True)


@pytest.mark.usefixtures("mlx")
@pytest.mark.parametrize("kernel, passes", (
    (foreign_kernels.torch_decode, 1), (foreign_kernels.mlx_vector, 1),
    (foreign_kernels.mlx_vector, 2),
))
def test_vector_kernels_keep_every_rule(checked, kernel, passes):
    q, k, v = operands(torch.float16, 64, seqlen_q=2, seqlen_k=67)
    judge(kernel, q, k, v, "bool", passes=passes)


def test_race_in_first_pass_of_torch_decode(checked):
    """All 32 lanes of simdgroup 0 store the row's sum and maximum, where MLX lets one lane do it.

    They store the same value, so no GPU shows it; a race it is, and the results are judged above,
    without checks.
    """
    q, k, v = operands(torch.float16, 64, seqlen_q=2, seqlen_k=67)
    with pytest.raises(RuntimeError, match=r"slot 4 'sums'.* has written without a barrier"):
        foreign_kernels.torch_decode(q, k, v, passes=2)
    judge(foreign_kernels.torch_decode, q, k, v, "dense", passes=2, is_mended=True)
