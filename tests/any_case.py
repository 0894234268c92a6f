"""Any attention problem, for property-based tests: all options together."""

import torch
from cases import Case
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

#: What a kernel is compiled for, so few of them: dtype, head dimensions (the largest of the
#: instance), kind of mask, and which of softcap, ALiBi, sinks and dropout there are. All else is
#: drawn.
BUILDS = (
    (torch.float32, (8, 16), "float", "softcap alibi sinks dropout"),
    (torch.float16, (64, 64), "bool", "softcap sinks dropout"),
    (torch.bfloat16, (32, 64), "float32", "softcap alibi sinks dropout"),
    (torch.float32, (72, 40), None, "softcap alibi"),
    (torch.float16, (16, 304), "float", "sinks dropout"),
    (torch.bfloat16, (320, 32), None, "alibi dropout"),
    (torch.float32, (64, 64), "bool", "alibi sinks"),
    (torch.float16, (128, 128), None, ""),
)

SAME_EVERY_TIME = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@st.composite
def any_case(draw, max_rows: int = 140, layouts: tuple[str, ...] = ("sliced", "bshd", "strided")):
    dtype, dims, mask, modifiers = draw(st.sampled_from(BUILDS))
    if mask is not None:
        mask += "." + "".join(dim for dim in "bhqk" if draw(st.booleans()))
    heads_kv = draw(st.integers(1, 3))
    head_dim, head_dim_v = (dim - draw(st.integers(0, 7)) for dim in dims)
    windows = st.one_of(st.just(-1), st.integers(0, 8), st.integers(0, 150))
    return Case(
        draw(st.integers(1, 3)),
        heads_kv * draw(st.integers(1, 4)),
        heads_kv,
        draw(st.sampled_from([0, 1, 1]) | st.integers(2, max_rows)),
        draw(st.sampled_from([0, 1]) | st.integers(2, 140)),
        head_dim,
        head_dim_v,
        dtype,
        causal=draw(st.booleans()),
        mask=mask,
        layout=draw(st.sampled_from(layouts)),
        scale=draw(st.sampled_from([None, None, 0.0, -0.2])),
        window=(draw(windows), draw(windows)),
        softcap=draw(st.sampled_from([0.5, 2.0, 30.0])) if "softcap" in modifiers else 0.0,
        alibi=draw(st.sampled_from(["heads", "batch"])) if "alibi" in modifiers else None,
        sinks="sinks" in modifiers,
        dropout_p=draw(st.sampled_from([0.1, 0.5, 1.0])) if "dropout" in modifiers else 0.0,
        bottom_right=draw(st.booleans()),
    )
