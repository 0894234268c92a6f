"""flash_decode with the classes of a mask: what no row sees is not read, and no bit changes."""

import math
from dataclasses import replace

import pytest
import torch
from blocked_masks import HIDDEN, MIXED, OPEN, blocked_mask
from cases import Case, make_inputs, poisoned
from checks import check, check_same_bits
from torch import Tensor

import torch_flash_mps
from torch_flash_mps.reference import attention_ref

# One simdgroup's rows read the keys where they lie; more of them from threadgroup memory.
DIRECT = Case(2, 8, 2, 1, 300, 64, dtype=torch.float16)
STAGED = replace(DIRECT, seqlen_q=9)
MASKS = {
    "keys": ((2, 1, 1, 300), torch.bool),
    "queries": ((1, 1, None, 300), torch.float16),
    "heads": ((1, 8, None, 300), torch.bool),
}
OPTIONS = {"all": {}, "window": {"window_left": 250, "is_bottom_right": True}}


def decode(case: Case, mask: Tensor, classes: Tensor | None, **options) -> tuple[Tensor, Tensor]:
    q, k, v = make_inputs(case, mask.device).operands
    return torch.ops.flash_mps.attention_with_lse(
        q, k, v, mask, enable_gqa=True, block_classes=classes, **options)


@pytest.mark.parametrize("cores", [1, 8])
@pytest.mark.parametrize("case", [DIRECT, STAGED], ids=["direct", "staged"])
def test_classes_never_change_a_bit_of_a_decode(checked, device, on_cores, case, cores):
    on_cores(cores)
    for name, (shape, dtype) in MASKS.items():
        shape = tuple(case.seqlen_q if size is None else size for size in shape)
        mask = blocked_mask(shape, dtype)
        mask[..., 64:96] = False if dtype == torch.bool else -math.inf
        mask[..., 128:160] = True if dtype == torch.bool else 0.0
        mask = poisoned(mask, device)
        classes = torch.ops.flash_mps.mask_block_classes(mask)
        assert set(classes.flatten().tolist()) == {HIDDEN, MIXED, OPEN}
        for options in OPTIONS.values():
            got = decode(case, mask, classes, **options)
            for table in (None, torch.full_like(classes, MIXED)):
                for one, other in zip(got, decode(case, mask, table, **options), strict=True):
                    check_same_bits(one, other, name)


@pytest.mark.parametrize("case", [DIRECT, STAGED], ids=["direct", "staged"])
def test_a_decode_believes_its_table(device, case):
    """Keys 64 to 95 are hidden by the table alone, then shown by it; one block of one head, too."""
    mask = torch.ones(1, 8, case.seqlen_q, 300, dtype=torch.bool, device=device)
    hidden = mask.clone()
    hidden[..., 64:96] = False
    classes = torch.full((1, 1, 1, 10), MIXED, dtype=torch.uint8, device=device)
    classes[..., 2] = HIDDEN
    without = [decode(case, one, None) for one in (hidden, mask)]
    for one, other in zip(decode(case, mask, classes), without[0], strict=True):
        check_same_bits(one, other)
    for one, other in zip(decode(case, hidden, torch.full_like(classes, OPEN)), without[1],
                          strict=True):
        check_same_bits(one, other)
    # A block that one head of a group sees is read, and the mask of all is.
    hidden[:, 3, :, 64:96] = True
    by_head = torch.ops.flash_mps.mask_block_classes(hidden)
    assert by_head[0, :, 0, 2].tolist() == [HIDDEN] * 3 + [OPEN] + [HIDDEN] * 4
    for one, other in zip(decode(case, hidden, by_head), decode(case, hidden, None), strict=True):
        check_same_bits(one, other)


def read_bytes(simulator, case: Case, mask: Tensor, classes: Tensor) -> int:
    simulator.reset_counters()
    with simulator.checks():
        decode(case, mask, classes)
    return sum(row["device_bytes_read_distinct"] for row in simulator.counters())


@pytest.mark.parametrize("case", [DIRECT, STAGED], ids=["direct", "staged"])
def test_left_padding_is_not_read(device, simulator, on_cores, case):
    """96 of 300 keys are padding: neither they nor, where all is visible, the mask are read."""
    if simulator is None:
        pytest.skip("bytes are counted by the simulated device")
    on_cores(1)
    mask = (torch.arange(300, device=device) >= 96).expand(2, 1, 1, 300)
    classes = torch.ops.flash_mps.mask_block_classes(mask)
    key_bytes = 2 * case.num_heads_kv * 2 * case.head_dim * 2
    query_bytes = 2 * case.num_heads_q * case.seqlen_q * case.head_dim * 2
    groups = 2 * case.num_heads_kv
    read = read_bytes(simulator, case, mask, classes)
    assert read == 204 * key_bytes + query_bytes + groups * 10
    mixed = read_bytes(simulator, case, mask, torch.full_like(classes, MIXED))
    keys = 300 if case is STAGED else 204
    assert mixed == keys * key_bytes + query_bytes + groups * (10 + 300)


@pytest.mark.parametrize("paged", [False, True], ids=["entries", "pages"])
def test_a_cache_with_a_mask_classifies_it_where_that_pays(device, kernels, paged):
    """As one call for each sequence, which is too small to."""
    batch, heads_kv, seqlen = 8, 2, 2048
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(batch, 8, 9, 64, generator=generator).half().to(device)
    k, v = (torch.randn(batch, heads_kv, seqlen, 64, generator=generator).half().to(device)
            for _ in range(2))
    padding = torch.tensor([0, 33, 500, 1000, 1500, 1999, 2000, 2047], device=device)
    mask = (torch.arange(seqlen, device=device) >= padding[:, None])[:, None, None]
    seqlens = torch.full((batch,), seqlen, dtype=torch.int32, device=device)
    table = None
    if paged:
        # [pages, heads, 256, D], the pages of a sequence in reverse
        pages = torch.arange(batch * 8, dtype=torch.int32, device=device).flip(0).view(batch, 8)
        table = pages
        k, v = (x.unflatten(2, (8, 256)).transpose(1, 2).flatten(0, 1).flip(0).contiguous()
                for x in (k, v))

    def call(rows: slice):
        cache = (k, v) if paged else (k[rows], v[rows])
        return torch.ops.flash_mps.attention_with_kvcache(
            q[rows], *cache, mask[rows], seqlens_k=seqlens[rows],
            block_table=None if table is None else table[rows], num_splits=1)

    kernels()
    got = call(slice(None))
    assert any(name.startswith("mask_block_classes") for name in kernels())
    each = [call(slice(index, index + 1)) for index in range(batch)]
    assert not any(name.startswith("mask_block_classes") for name in kernels())
    for one, others in zip(got, zip(*each, strict=True), strict=True):
        check_same_bits(one, torch.cat(others))
    if not paged:
        ref, _ = attention_ref(q, k, v, attn_mask=mask)
        check(got[0], ref)


def test_explain_tells_whether_a_decode_classifies_its_mask(device):
    row = torch.zeros(1, 1, 1, 128, device=device, dtype=torch.float16)
    mask = torch.ones(1, 1, 1, 8192, dtype=torch.bool, device=device)
    k = row.expand(1, 8, 8192, 128)
    for rows, expected in ((1, False), (9, True)):
        plan = torch_flash_mps.explain(row.expand(1, 32, rows, 128), k, k, attn_mask=mask,
                                       enable_gqa=True)
        assert plan["kernel"].startswith("flash_decode") and plan["classifies_mask"] == expected
