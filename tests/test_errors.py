"""Bad input is a Python exception that names op, operand, expected and found; never an abort."""

import pytest
from error_calls import check_raised, run_calls

NAMES = """
Q, K = t(2, 4, 3, 8), t(2, 4, 5, 8)
attention = torch.ops.flash_mps.attention
with_lse = torch.ops.flash_mps.attention_with_lse
"""

# id: (call, exception, what its text says, in this order).
CALLS = {
    "HD-05-rank-1-query": (
        "attention(t(8), K, K)", "RuntimeError", ["attention: expected query of rank 2", "[8]"]),
    "HD-05-rank-1-key": (
        "attention(Q, t(8), K)", "RuntimeError", ["attention: expected key of rank 2", "[8]"]),
    "HD-05-rank-1-value": (
        "attention(Q, K, t(8))", "RuntimeError", ["attention: expected value of rank 2", "[8]"]),
    "HD-05-batch": (
        "attention(Q, t(3, 4, 5, 8), t(3, 4, 5, 8))", "RuntimeError",
        ["attention: expected query, key and value of equal batch size", "[2, 4, 3, 8]",
         "[3, 4, 5, 8]"]),
    "HD-05-head-dim": (
        "attention(Q, t(2, 4, 5, 9), K)", "RuntimeError",
        ["attention: expected key with the head_dim of query, 8", "9"]),
    "HD-05-seqlen-of-value": (
        "attention(Q, K, t(2, 4, 6, 8))", "RuntimeError",
        ["attention: expected value with the seqlen of key, 5", "6"]),
    "HD-05-heads-of-value": (
        "attention(Q, K, t(2, 2, 5, 8), enable_gqa=True)", "RuntimeError",
        ["attention: expected value with the head count of key, 4", "2"]),
    "HD-05-lse-op-names-itself": (
        "with_lse(t(8), K, K)", "RuntimeError", ["attention_with_lse: expected query of rank 2"]),
    "PY-06-heads-do-not-divide": (
        "attention(t(2, 6, 3, 8), K, K, enable_gqa=True)", "RuntimeError",
        ["attention: expected a query head count that is a multiple of key's", "[B, H, S, D]",
         "[2, 6, 3, 8]", "[2, 4, 5, 8]"]),
    "PY-06-gqa-without-the-flag": (
        "attention(t(2, 8, 3, 8), K, K)", "RuntimeError",
        ["attention: expected enable_gqa=True", "8 query heads and 4 key heads"]),
    "HD-06-all-on-cpu-but-query": (
        "attention(Q, K.cpu(), K)", "RuntimeError",
        ["attention: expected key on the device of query, mps", "cpu"]),
    "HD-06-value-on-cpu": (
        "attention(Q, K, K.cpu())", "RuntimeError",
        ["attention: expected value on the device of query, mps", "cpu"]),
    "HD-06-mask-on-cpu": (
        "attention(Q, K, K, t(3, 5, device='cpu'))", "RuntimeError",
        ["attention: expected attn_mask on the device of query, mps", "cpu"]),
    "HD-06-query-on-cpu": (
        "attention(Q.cpu(), K, K)", "RuntimeError",
        ["attention: expected key on the device of query, cpu", "mps"]),
    "HD-07-mixed-dtypes": (
        "attention(Q, K, K.half())", "RuntimeError",
        ["attention: expected query, key and value to have the same dtype", "Float", "Float",
         "Half"]),
    "HD-08-int64-mask": (
        "attention(Q, K, K, t(3, 5, dtype=torch.int64))", "RuntimeError",
        ["attention: expected attn_mask of dtype Bool, Float or query's, Float", "Long"]),
    "HD-08-float64-mask": (
        "attention(Q.cpu(), K.cpu(), K.cpu(), t(3, 5, device='cpu', dtype=torch.float64))",
        "RuntimeError",
        ["attention: expected attn_mask of dtype Bool, Float or query's, Float", "Double"]),
    "HD-08-bf16-mask-on-f16": (
        "attention(Q.half(), K.half(), K.half(), t(3, 5, dtype=torch.bfloat16))", "RuntimeError",
        ["attention: expected attn_mask of dtype Bool, Float or query's, Half", "BFloat16"]),
    "HD-08-f16-mask-on-f32": (
        "attention(Q, K, K, t(3, 5, dtype=torch.float16))", "RuntimeError",
        ["attention: expected attn_mask of dtype Bool, Float or query's, Float", "Half"]),
    "mask-shape": (
        "attention(Q, K, K, t(3, 6))", "RuntimeError",
        ["attention: expected attn_mask", "[2, 4, 3, 5]", "[3, 6]"]),
    "mask-of-kv-heads": (
        "attention(t(2, 8, 3, 8), K, K, t(2, 4, 3, 5), enable_gqa=True)", "RuntimeError",
        ["attention: expected attn_mask", "[2, 8, 3, 5]", "[2, 4, 3, 5]"]),
    "HD-16-mask-of-rank-1": (
        "attention(Q, K, K, t(5))", "RuntimeError",
        ["attention: expected attn_mask of rank 2 or more", "[5]"]),
    "mask-of-rank-5": (
        "attention(Q, K, K, t(1, 2, 4, 3, 5))", "RuntimeError",
        ["attention: expected attn_mask", "[1, 2, 4, 3, 5]"]),
    "KF-28-float64": (
        "attention(*[t(1, 1, 2, 8, device='cpu', dtype=torch.float64)] * 3)", "RuntimeError",
        ["attention: expected query of dtype Float, Half or BFloat16", "Double"]),
    "KF-28-int32": (
        "attention(*[t(1, 1, 2, 8, dtype=torch.int32)] * 3)", "RuntimeError",
        ["attention: expected query of dtype Float, Half or BFloat16", "Int"]),
    "KF-28-uint8": (
        "attention(*[t(1, 1, 2, 8, dtype=torch.uint8)] * 3)", "RuntimeError",
        ["attention: expected query of dtype Float, Half or BFloat16", "Byte"]),
    "KF-28-complex64": (
        "attention(*[t(1, 1, 2, 8, device='cpu', dtype=torch.complex64)] * 3)", "RuntimeError",
        ["attention: expected query of dtype Float, Half or BFloat16", "ComplexFloat"]),
    "KF-11-head-dim-beyond-the-table": (
        "attention(t(1, 4, 17, 577), t(1, 1, 7, 577), t(1, 1, 7, 512), enable_gqa=True)",
        "RuntimeError",
        ["attention: expected head_dim and head_dim_v of at most 576", "577 and 512"]),
    "KF-11-head-dim-beyond-the-decode-table": (
        "attention(t(1, 4, 1, 8), t(1, 1, 7, 8), t(1, 1, 7, 577), enable_gqa=True)",
        "RuntimeError",
        ["attention: expected head_dim and head_dim_v of at most 576 for up to 16 queries",
         "8 and 577"]),
    "dropout-below-0": (
        "attention(Q, K, K, None, -0.1)", "RuntimeError",
        ["attention: expected dropout_p between 0 and 1", "-0.1"]),
    "dropout-above-1": (
        "attention(Q, K, K, None, 1.5)", "RuntimeError",
        ["attention: expected dropout_p between 0 and 1", "1.5"]),
    "dropout-nan": (
        "attention(Q, K, K, None, float('nan'))", "RuntimeError",
        ["attention: expected dropout_p between 0 and 1", "nan"]),
    "PY-07-rng-state": (
        "attention(Q, K, K, None, 0.5, rng_state=torch.zeros(3, dtype=torch.int32))",
        "RuntimeError",
        ["attention: expected rng_state of dtype Int and shape [2] on the CPU", "[3]"]),
    "window-left-below-minus-1": (
        "attention(Q, K, K, window_left=-2)", "RuntimeError",
        ["attention: expected window_left of -1", "-2"]),
    "window-right-below-minus-1": (
        "attention(Q, K, K, window_right=-3)", "RuntimeError",
        ["attention: expected window_right of -1 (unlimited) or more", "-3"]),
    "KF-24-softcap-negative": (
        "attention(Q, K, K, softcap=-1.0)", "RuntimeError",
        ["attention: expected softcap of 0 (off) or a positive number", "-1"]),
    "KF-24-softcap-nan": (
        "attention(Q, K, K, softcap=float('nan'))", "RuntimeError",
        ["attention: expected softcap of 0 (off) or a positive number", "nan"]),
    "KF-24-softcap-infinite": (
        "attention(Q, K, K, softcap=float('inf'))", "RuntimeError",
        ["attention: expected softcap of 0 (off) or a positive number", "inf"]),
    "KF-24-softcap-beyond-float32": (
        "attention(Q, K, K, softcap=1e300)", "RuntimeError",
        ["attention: expected softcap of 0 (off) or a positive number", "1e+300"]),
    "KF-24-softcap-that-is-0-in-float32": (
        "attention(Q, K, K, softcap=1e-50)", "RuntimeError",
        ["attention: expected softcap of 0 (off) or a positive number", "1e-50"]),
    "PY-13-alibi-of-too-many-heads": (
        "attention(Q, K, K, alibi_slopes=t(5))", "RuntimeError",
        ["attention: expected alibi_slopes of shape [4] or [2, 4]", "[5]"]),
    "PY-13-alibi-of-kv-heads": (
        "attention(Q, K[:, :2], K[:, :2], alibi_slopes=t(2, 2), enable_gqa=True)", "RuntimeError",
        ["attention: expected alibi_slopes of shape [4] or [2, 4]", "[2, 2]"]),
    "PY-13-alibi-of-another-batch": (
        "attention(Q, K, K, alibi_slopes=t(1, 4))", "RuntimeError",
        ["attention: expected alibi_slopes of shape [4] or [2, 4]", "[1, 4]"]),
    "alibi-dtype": (
        "attention(Q, K, K, alibi_slopes=t(4, dtype=torch.float16))", "RuntimeError",
        ["attention: expected alibi_slopes of dtype Float or query's, Float", "Half"]),
    "alibi-int64": (
        "attention(Q.half(), K.half(), K.half(), alibi_slopes=t(4, dtype=torch.int64))",
        "RuntimeError",
        ["attention: expected alibi_slopes of dtype Float or query's, Half", "Long"]),
    "HD-06-alibi-on-cpu": (
        "attention(Q, K, K, alibi_slopes=t(4, device='cpu'))", "RuntimeError",
        ["attention: expected alibi_slopes on the device of query, mps", "cpu"]),
    "alibi-with-rank-3": (
        "attention(Q[0], K[0], K[0], alibi_slopes=t(4))", "RuntimeError",
        ["attention: expected alibi_slopes with query of rank 4 or more", "[4]"]),
    "KF-25-sinks-of-kv-heads": (
        "attention(Q, K[:, :2], K[:, :2], sinks=t(2), enable_gqa=True)", "RuntimeError",
        ["attention: expected sinks of shape [4]", "[2]"]),
    "KF-25-sinks-of-a-batch": (
        "attention(Q, K, K, sinks=t(2, 4))", "RuntimeError",
        ["attention: expected sinks of shape [4]", "[2, 4]"]),
    "sinks-dtype": (
        "attention(Q.half(), K.half(), K.half(), sinks=t(4, dtype=torch.bfloat16))",
        "RuntimeError", ["attention: expected sinks of dtype Float or query's, Half", "BFloat16"]),
    "HD-06-sinks-on-cpu": (
        "attention(Q, K, K, sinks=t(4, device='cpu'))", "RuntimeError",
        ["attention: expected sinks on the device of query, mps", "cpu"]),
    "sinks-with-rank-3": (
        "with_lse(Q[0], K[0], K[0], sinks=t(4))", "RuntimeError",
        ["attention_with_lse: expected sinks with query of rank 4 or more", "[4]"]),
    "alibi-requires-grad": (
        "attention(Q, K, K, alibi_slopes=t(4).requires_grad_())", "NotImplementedError",
        ["attention: the gradient of alibi_slopes is not supported yet"]),
    "BW-13-double-backward-of-sinks": (
        "(sinks := t(4).requires_grad_()) is not None and "
        "attention(Q, K, K, sinks=sinks).sum().backward(create_graph=True) or "
        "sinks.grad.sum().backward()", "RuntimeError",
        ["attention_backward: double backward is not supported", "scaled_dot_product_attention"]),
    "BW-13-forward-mode-of-sinks": (
        "torch.func.jvp(lambda s: attention(Q, K, K, sinks=s), (t(4),), (t(4),))",
        "NotImplementedError", ["attention: forward-mode differentiation is not supported"]),
    "BW-13-double-backward": (
        "attention(Q.requires_grad_(), K, K).sum().backward(create_graph=True) or "
        "Q.grad.sum().backward()", "RuntimeError",
        ["attention_backward: double backward is not supported", "scaled_dot_product_attention"]),
    "BW-13-forward-mode": (
        "torch.func.jvp(attention, (Q, K, K), (Q, K, K))", "NotImplementedError",
        ["attention: forward-mode differentiation is not supported",
         "scaled_dot_product_attention"]),
    "BW-13-vmap-over-sinks": (
        "torch.vmap(lambda sinks: attention(Q, K, K, sinks=sinks))(t(3, 4))",
        "NotImplementedError", ["attention: torch.vmap over sinks is not supported"]),
    "BW-13-vmap-over-alibi": (
        "torch.vmap(lambda slopes: attention(Q, K, K, alibi_slopes=slopes))(t(3, 4))",
        "NotImplementedError", ["attention: torch.vmap over alibi_slopes is not supported"]),
    "PY-11-tensor-scale": (
        "attention(Q, K, K, scale=torch.ones(2))", "RuntimeError|TypeError", ["scale"]),
    "unknown-option": (
        "attention(Q, K, K, windw=3)", "RuntimeError|TypeError", ["windw"]),
    "unknown-option-of-the-function": (
        "torch_flash_mps.attention(Q, K, K, windw=3)", "TypeError", ["windw"]),
    "positional-mask-of-the-function": (
        "torch_flash_mps.attention(Q, K, K, None)", "TypeError", ["positional"]),
}

WORKS_AFTERWARDS = "attention(Q, K, torch.ones_like(K))"


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
