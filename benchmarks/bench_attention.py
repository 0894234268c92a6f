"""Times our attention, PyTorch's own and the naive one on the device at hand.

Nothing is timed whose result is wrong. On the simulated device the times say how long a CPU took
to simulate, nothing about an Apple GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from cases import GQA, LAYOUT, MASKED, MODELS, SMOKE, Case, Inputs, flops, make_inputs  # noqa: E402
from checks import attention_lowp, check  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.readme import rewrite_section  # noqa: E402
from torch_flash_mps.cli import machine, timing  # noqa: E402
from torch_flash_mps.cli.baselines import NAIVE, Calls, attention_calls  # noqa: E402
from torch_flash_mps.flash_attn import flash_attn_with_kvcache  # noqa: E402
from torch_flash_mps.reference import attention_ref  # noqa: E402

# A decode step at long context with few KV heads (DE-11), and one that a CPU simulates quickly.
DECODE = {
    f"decode-sk{seqlen_k}-kv{heads}": Case(1, 32, heads, 1, seqlen_k, 128, dtype=torch.bfloat16)
    for seqlen_k in (1024, 32768) for heads in (1, 2, 4, 8, 32)
}
CASES = MODELS | DECODE | {case.id: case for case in (*SMOKE, *GQA, *MASKED, *LAYOUT)}
OPS = ("fwd", "decode")
# One key, so that a call is nothing but its overhead; and seconds from Python to encoded.
OVERHEAD = {"fwd": (Case(seqlen_q=17, seqlen_k=1), 25e-6),
            "decode": (Case(seqlen_q=1, seqlen_k=1), 20e-6)}
SPEED_BAR = 0.5               # GFLOP a CPU second, fast mode
CHECKED_BAR = 15              # times slower than fast mode
SPEED_CASE = Case(seqlen_q=1024, seqlen_k=1024, head_dim=64)


def main() -> int:
    options = parse()
    if options.device == "mps" and (reason := machine.find_device()) is not None:
        sys.exit(f"bench_attention: no kernel can run here: {reason}")
    print(about(options.device))
    with torch.inference_mode():
        if options.overhead:
            lines, missed = overhead(options.op, options.device, options.repeats)
            return report(f"overhead {options.op}", f"--op {options.op} --overhead", lines, missed,
                          options)
        if options.simulator:
            return report("simulator", "--simulator", *simulator_speed(options.repeats), options)
        for name in options.case or default_cases(options.op):
            print_case(name, CASES[name], options)
    return 0


def default_cases(op: str) -> list[str]:
    if op == "fwd":
        return list(MODELS)
    seqlen_k = 1024 if machine.is_simulated() else 32768
    return [name for name, case in DECODE.items() if case.seqlen_k == seqlen_k]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", choices=OPS, default="fwd")
    parser.add_argument("--device", default="mps", choices=["mps", "cpu"])
    parser.add_argument("--case", action="append", choices=CASES, metavar="NAME",
                        help=f"may be repeated; without any, {', '.join(MODELS)}, or with --op "
                        f"decode {', '.join(DECODE)} (the short ones on the simulated device). "
                        "Others are the ids of tests/cases.py, such as " + SMOKE[0].id)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True,
                        help="compare with float64 first (the default)")
    parser.add_argument("--overhead", action="store_true",
                        help="time a call until it returns, its kernel encoded and not yet run")
    parser.add_argument("--simulator", action="store_true",
                        help="speed of the simulated device per core, and the price of its checks")
    parser.add_argument("--write", action="store_true",
                        help="put the result of --overhead or --simulator in README.md too")
    return parser.parse_args()


def about(device: str) -> str:
    if device == "cpu":
        return this_cpu()
    return f"{machine.about()}{f'; {machine.SIMULATED}' * machine.is_simulated()}"


def this_cpu() -> str:
    return f"torch {torch.__version__}, {machine.cpu_model()}, {os.cpu_count()} cores"


def report(name: str, arguments: str, lines: list[str], missed: bool,
           options: argparse.Namespace) -> int:
    print("\n".join(f"  {line}" for line in lines))
    if missed:
        print("The bar is missed.")
    elif options.write:
        rewrite_section(
            name, f"`python benchmarks/bench_attention.py {arguments}`; {listed(lines)}")
    return int(missed)


def listed(lines: list[str]) -> str:
    """Results, after the machine that they are from."""
    return "\n".join([f"{this_cpu()}:", "", *(f"- {line}" for line in lines)])


def print_case(name: str, case: Case, options: argparse.Namespace) -> None:
    inputs = make_inputs(case)
    calls = calls_of(contiguous(inputs, options.device))
    if options.check:
        ref, _ = attention_ref(*inputs.operands, **inputs.options)
        lowp = attention_lowp(*inputs.operands, **inputs.options)
        for who, call in calls.items():
            check(call(), ref, lowp, case_id=f"{name} {who}")
    timings = timing.interleaved(
        calls, lambda: machine.synchronize(options.device), options.repeats)
    print(f"{name} ({case.id})")
    for who, spent in timings.items():
        print(f"  {who:34} {spent}   {flops(case) / spent.median / 1e9:.3g} GFLOP/s, "
              f"{kv_bytes(case) / spent.median / 1e9:.3g} GB/s of K and V")


def kv_bytes(case: Case) -> int:
    """K and V once."""
    keys = case.batch * case.num_heads_kv * case.seqlen_k
    return keys * (case.head_dim + case.value_dim) * case.dtype.itemsize


def contiguous(inputs: Inputs, device: str) -> Inputs:
    def place(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.contiguous().to(device)

    return Inputs(*map(place, inputs.operands), place(inputs.attn_mask), inputs.is_causal,
                  inputs.scale, inputs.score_options)


def calls_of(inputs: Inputs) -> Calls:
    return attention_calls(*inputs.operands, **inputs.options)


@torch.inference_mode()
def overhead(op: str, device: str, repeats: int) -> tuple[list[str], bool]:
    """Time until a call returns. PyTorch's own includes its maths on the simulated device."""
    case, bar = OVERHEAD[op]
    inputs = contiguous(make_inputs(case), device)
    calls = calls_of(inputs)
    del calls[NAIVE]
    if op == "decode":
        calls |= cache_calls(inputs)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)   # to wake others costs more than this maths
    timings = timing.overhead(calls, lambda: machine.synchronize(device), max(repeats, 100))
    torch.set_num_threads(num_threads)
    lines = [
        f"{who}: {spent.median * 1e6:.1f} µs ({spent.lower * 1e6:.1f} to {spent.upper * 1e6:.1f}) "
        "until the call returns" for who, spent in timings.items()
    ]
    lines.append(f"bar for the ops flash_mps::…: {bar * 1e6:.0f} µs")
    return lines, any(spent.median >= bar for who, spent in timings.items()
                      if who.startswith("flash_mps::"))


def cache_calls(inputs: Inputs) -> Calls:
    """Two dispatches, where one split would do; a cache; and the function for models, in Python."""
    op = torch.ops.flash_mps.attention_with_kvcache
    q, k, v = inputs.operands
    many = [x.repeat(1, 1, 32, 1) for x in (k, v)]
    seqlens = torch.ones(1, dtype=torch.int32, device=q.device)
    token, k_cache, v_cache = (x.transpose(1, 2) for x in (q, *many))
    return {
        "flash_mps::attention_with_kvcache": lambda: op(q, *many, seqlens_k=seqlens)[0],
        "flash_mps::attention_with_kvcache, 2 splits": lambda: op(
            q, *many, seqlens_k=seqlens, num_splits=2)[0],
        "flash_attn_with_kvcache, one token appended (two ops)": lambda: flash_attn_with_kvcache(
            token, k_cache, v_cache, token, token, cache_seqlens=seqlens),
    }


def simulator_speed(repeats: int) -> tuple[list[str], bool]:
    """GFLOP a second of CPU time: per core, however many there are and whatever else they do."""
    from torch_flash_mps import simulator

    q, k, v = contiguous(make_inputs(SPEED_CASE), "mps").operands
    call = {"fwd": lambda: torch.ops.flash_mps.attention(q, k, v)}
    speeds = {}
    for mode, is_checked in (("fast", False), ("checked", True)):
        with simulator.checks(is_checked):
            spent = timing.interleaved(call, torch.mps.synchronize, repeats, time.process_time)
        speeds[mode] = flops(SPEED_CASE) / spent["fwd"].median / 1e9
    ratio = speeds["fast"] / speeds["checked"]
    lines = [f"{mode} mode: {speed:.2f} GFLOP/s per core ({SPEED_CASE.id})"
             for mode, speed in speeds.items()]
    lines += [f"checked mode is {ratio:.1f} times slower",
              f"bars: {SPEED_BAR} GFLOP/s per core in fast mode, {CHECKED_BAR} times slower"]
    return lines, speeds["fast"] < SPEED_BAR or ratio > CHECKED_BAR


if __name__ == "__main__":
    sys.exit(main())
