"""Bad input of the cache's attention op is a Python exception that says what does not fit."""

import pytest
from error_calls import check_raised, run_calls

NAMES = """
Q, K = t(2, 4, 3, 8), t(2, 2, 16, 8)
I8, SCALE = t(2, 2, 16, 8, dtype=torch.int8), t(2, 2, 16)
PAGES, TABLE = t(6, 2, 16, 8), t(2, 3, dtype=torch.int32)
LENGTHS = t(2, dtype=torch.int32)
op = torch.ops.flash_mps.attention_with_kvcache
def lengths(**changes):
    return t(2, **({"dtype": torch.int32} | changes))
"""

NAME = "attention_with_kvcache: "
# id: (call, exception, what its text says, in this order).
CALLS = {
    "HD-05-rank-3-query": (
        "op(t(4, 3, 8), K, K)", "RuntimeError", [NAME + "expected query of rank 4", "[4, 3, 8]"]),
    "HD-05-rank-3-key": (
        "op(Q, t(2, 16, 8), K)", "RuntimeError",
        [NAME + "expected key cache of rank 4", "[2, 16, 8]"]),
    "HD-05-rank-5-value": (
        "op(Q, K, t(1, 2, 2, 16, 8))", "RuntimeError",
        [NAME + "expected value cache of rank 4", "[1, 2, 2, 16, 8]"]),
    "HD-05-head-dim": (
        "op(Q, t(2, 2, 16, 9), K)", "RuntimeError",
        [NAME + "expected key cache with the head_dim of query, 8", "9"]),
    "HD-05-seqlen-of-value": (
        "op(Q, K, t(2, 2, 17, 8))", "RuntimeError",
        [NAME + "expected key and value cache alike but for their head_dim", "[2, 2, 16, 8]",
         "[2, 2, 17, 8]"]),
    "HD-05-heads-of-value": (
        "op(Q, K, t(2, 4, 16, 8))", "RuntimeError",
        [NAME + "expected key and value cache alike but for their head_dim", "[2, 2, 16, 8]",
         "[2, 4, 16, 8]"]),
    "HD-05-batch-of-the-cache": (
        "op(Q, t(1, 2, 16, 8), t(1, 2, 16, 8))", "RuntimeError",
        [NAME + "expected a cache of at least 2 entries", "1", "[1, 2, 16, 8]"]),
    "PY-06-heads-do-not-divide": (
        "op(t(2, 3, 3, 8), K, K)", "RuntimeError",
        [NAME + "expected a query head count that is a multiple of the cache's", "[B, H, S, D]",
         "[2, 3, 3, 8]", "[2, 2, 16, 8]"]),
    "HD-06-key-on-cpu": (
        "op(Q, K.cpu(), K)", "RuntimeError",
        [NAME + "expected key cache on mps", "cpu"]),
    "HD-06-mask-on-cpu": (
        "op(Q, K, K, t(3, 16, device='cpu'))", "RuntimeError",
        [NAME + "expected attn_mask on the device of query, mps", "cpu"]),
    "HD-07-mixed-dtypes": (
        "op(Q, K, K.half())", "RuntimeError",
        [NAME + "expected value cache of dtype Float", "Half"]),
    "HD-07-float-cache-of-another-dtype": (
        "op(Q.half(), K, K)", "RuntimeError", [NAME + "expected key cache of dtype Half", "Float"]),
    "KF-28-float64": (
        "op(Q.cpu().double(), K.cpu().double(), K.cpu().double())", "RuntimeError",
        [NAME + "expected query of dtype Float, Half or BFloat16", "Double"]),
    "HD-08-mask-dtype": (
        "op(Q, K, K, t(3, 16, dtype=torch.int64))", "RuntimeError",
        [NAME + "expected attn_mask of dtype Bool, Float or query's, Float", "Long"]),
    "mask-shape": (
        "op(Q, K, K, t(3, 17))", "RuntimeError",
        [NAME + "expected attn_mask", "[2, 4, 3, 16]", "[3, 17]"]),
    "int8-without-k-scale": (
        "op(Q, I8, I8, v_scale=SCALE)", "RuntimeError",
        [NAME + "expected k_scale with an 8-bit cache", "none"]),
    "int8-without-v-scale": (
        "op(Q, I8, I8, k_scale=SCALE)", "RuntimeError",
        [NAME + "expected v_scale with an 8-bit cache", "none"]),
    "int8-key-only": (
        "op(Q, I8, K, k_scale=SCALE, v_scale=SCALE)", "RuntimeError",
        [NAME + "expected v_scale with an 8-bit cache only", "Float"]),
    "scale-of-a-float-cache": (
        "op(Q, K, K, k_scale=SCALE, v_scale=SCALE)", "RuntimeError",
        [NAME + "expected k_scale with an 8-bit cache only", "Float"]),
    "k-scale-shape": (
        "op(Q, I8, I8, k_scale=t(2, 2, 15), v_scale=SCALE)", "RuntimeError",
        [NAME + "expected k_scale", "[2, 2, 16]", "[2, 2, 15]"]),
    "v-scale-dtype": (
        "op(Q, I8, I8, k_scale=SCALE, v_scale=SCALE.half())", "RuntimeError",
        [NAME + "expected v_scale of dtype Float", "Half"]),
    "HD-06-v-scale-on-cpu": (
        "op(Q, I8, I8, k_scale=SCALE, v_scale=SCALE.cpu())", "RuntimeError",
        [NAME + "expected v_scale on mps", "cpu"]),
    "seqlens-dtype": (
        "op(Q, K, K, seqlens_k=lengths(dtype=torch.int64))", "RuntimeError",
        [NAME + "expected seqlens_k of dtype Int", "Long"]),
    "seqlens-shape": (
        "op(Q, K, K, seqlens_k=t(3, dtype=torch.int32))", "RuntimeError",
        [NAME + "expected seqlens_k of shape [2]", "[3]"]),
    "HD-06-seqlens-on-cpu": (
        "op(Q, K, K, seqlens_k=lengths(device='cpu'))", "RuntimeError",
        [NAME + "expected seqlens_k on mps", "cpu"]),
    "seqlen-new-negative": (
        "op(Q, K, K, seqlens_k=LENGTHS, seqlen_new=-1)", "RuntimeError",
        [NAME + "expected seqlen_new", "-1"]),
    "leftpad-dtype": (
        "op(Q, K, K, leftpad_k=lengths(dtype=torch.int64))", "RuntimeError",
        [NAME + "expected leftpad_k of dtype Int", "Long"]),
    "leftpad-shape": (
        "op(Q, K, K, leftpad_k=t(1, dtype=torch.int32))", "RuntimeError",
        [NAME + "expected leftpad_k of shape [2]", "[1]"]),
    "cache-batch-idx-dtype": (
        "op(Q, K, K, cache_batch_idx=lengths(dtype=torch.int64))", "RuntimeError",
        [NAME + "expected cache_batch_idx of dtype Int", "Long"]),
    "cache-batch-idx-shape": (
        "op(Q, K, K, cache_batch_idx=t(2, 1, dtype=torch.int32))", "RuntimeError",
        [NAME + "expected cache_batch_idx of shape [2]", "[2, 1]"]),
    "block-table-dtype": (
        "op(Q, PAGES, PAGES, block_table=TABLE.long())", "RuntimeError",
        [NAME + "expected block_table of dtype Int", "Long"]),
    "block-table-shape": (
        "op(Q, PAGES, PAGES, block_table=TABLE[:1])", "RuntimeError",
        [NAME + "expected block_table", "2", "[1, 3]"]),
    "block-table-rank": (
        "op(Q, PAGES, PAGES, block_table=TABLE[0])", "RuntimeError",
        [NAME + "expected block_table", "[3]"]),
    "HD-06-block-table-on-cpu": (
        "op(Q, PAGES, PAGES, block_table=TABLE.cpu())", "RuntimeError",
        [NAME + "expected block_table on mps", "cpu"]),
    "block-table-and-cache-batch-idx": (
        "op(Q, PAGES, PAGES, block_table=TABLE, cache_batch_idx=LENGTHS)", "RuntimeError",
        [NAME + "expected cache_batch_idx or block_table", "both"]),
    "page-size": (
        "op(Q, PAGES[:, :, :15], PAGES[:, :, :15], block_table=TABLE)", "RuntimeError",
        [NAME + "expected a page size that is a multiple of 16", "15"]),
    "a-cache-is-never-copied": (
        "op(Q, K, t(2, 2, 8, 16).mT)", "RuntimeError",
        [NAME + "expected value cache with a dense last dimension", "[256, 128, 1, 16]"]),
    "num-splits-negative": (
        "op(Q, K, K, num_splits=-1)", "RuntimeError", [NAME + "expected num_splits", "-1"]),
    "num-splits-beyond-the-table": (
        "op(Q, K, K, num_splits=129)", "RuntimeError",
        [NAME + "expected num_splits", "128", "129"]),
    "KF-11-head-dim-beyond-the-table": (
        "op(t(2, 4, 1, 584), t(2, 4, 9, 584), t(2, 4, 9, 8))", "RuntimeError",
        [NAME + "expected head_dim", "576", "584"]),
    "query-requires-grad": (
        "op(Q.requires_grad_(), K, K)", "RuntimeError",
        [NAME + "expected query without requires_grad", "no gradient"]),
    "mask-requires-grad": (
        "op(Q, K, K, t(3, 16).requires_grad_())", "RuntimeError",
        [NAME + "expected attn_mask without requires_grad", "no gradient"]),
    "window-left-below-minus-1": (
        "op(Q, K, K, window_left=-2)", "RuntimeError",
        [NAME + "expected window_left of -1 (unlimited) or more", "-2"]),
    "KF-24-softcap-negative": (
        "op(Q, K, K, softcap=-1.0)", "RuntimeError",
        [NAME + "expected softcap of 0 (off) or a positive number", "-1"]),
    "PY-13-alibi-shape": (
        "op(Q, K, K, alibi_slopes=t(2))", "RuntimeError",
        [NAME + "expected alibi_slopes of shape [4] or [2, 4]", "[2]"]),
    "alibi-dtype": (
        "op(Q, K, K, alibi_slopes=t(4, dtype=torch.int64))", "RuntimeError",
        [NAME + "expected alibi_slopes of dtype Float or query's, Float", "Long"]),
    "KF-25-sinks-shape": (
        "op(Q, K, K, sinks=t(2, 4))", "RuntimeError",
        [NAME + "expected sinks of shape [4]", "[2, 4]"]),
    "HD-06-sinks-on-cpu": (
        "op(Q, K, K, sinks=t(4, device='cpu'))", "RuntimeError",
        [NAME + "expected sinks on the device of query, mps", "cpu"]),
    "sinks-require-grad": (
        "op(Q, K, K, sinks=t(4).requires_grad_())", "RuntimeError",
        [NAME + "expected sinks without requires_grad", "no gradient"]),
    "unknown-option": (
        "op(Q, K, K, windw=3)", "RuntimeError|TypeError", ["windw"]),
}

WORKS_AFTERWARDS = "op(Q, K, torch.ones_like(K))[0]"


@pytest.fixture(scope="module")
def raised():
    calls = {name: call for name, (call, _, _) in CALLS.items()}
    return run_calls(calls | {"works": WORKS_AFTERWARDS}, NAMES)


@pytest.mark.parametrize("name", CALLS)
def test_error(raised, name):
    check_raised(raised[name], CALLS[name])


def test_the_op_works_after_all_those_errors(raised):
    kind, text = raised["works"]
    assert kind == "nothing" and "1." in text
