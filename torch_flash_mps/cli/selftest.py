"""Runs calls whose results are known; exit status 1 when one differs."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from torch_flash_mps.cli import machine
from torch_flash_mps.cli.anchors import ANCHORS, Anchor
from torch_flash_mps.judge import check_exact


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", action="append", metavar="ID",
                        help="only the anchors of this case, such as KF-27; may be repeated")


def run(options: argparse.Namespace) -> int:
    """Runs the anchors. Returns the exit status: 1 for a wrong result, 2 when none can run."""
    reason = machine.find_device()
    if reason is not None:
        print(f"selftest: no kernel can run here: {reason}", file=sys.stderr)
        return 2
    cases = {anchor.case for anchor in ANCHORS}
    unknown = [case for case in options.case or [] if case not in cases]
    if unknown:
        print(f"selftest: expected a case of {', '.join(sorted(cases))}, "
              f"got {', '.join(unknown)}", file=sys.stderr)
        return 2
    chosen = [anchor for anchor in ANCHORS if anchor.case in (options.case or cases)]
    print(machine.about())
    with torch.no_grad():
        return run_anchors(chosen)


def run_anchors(anchors: Iterable[Anchor]) -> int:
    """A line for each anchor. Returns 1 when the result of one is wrong, else 0."""
    began = time.perf_counter()
    failures = count = 0
    for anchor in anchors:
        start = time.perf_counter()
        problem = _problem(anchor)
        spent = time.perf_counter() - start
        print(f"{'WRONG' if problem else 'ok':5}  {anchor.case}  {anchor.kernel:8} "
              f"{anchor.about:52} {spent:6.2f} s", flush=True)
        if problem:
            print(f"       {problem}")
        failures += problem is not None
        count += 1
    verdict = f"{failures} wrong" if failures else "all right"
    where = " on the simulated device" if machine.is_simulated() else ""
    print(f"{count} anchors, {verdict}, in {time.perf_counter() - began:.1f} s{where}")
    return int(failures > 0)


def _problem(anchor: Anchor) -> str | None:
    """What is wrong with the results of an anchor; None when they are right."""
    try:
        with _nan_in_uninitialised_memory():
            for number, (got, expected, tolerance) in enumerate(anchor.results()):
                check_exact(got, expected, tolerance, case_id=f"result {number + 1}")
    except AssertionError as difference:
        return str(difference)
    except RuntimeError as error:   # of the op, of Metal, of the simulated device
        return f"{type(error).__name__}: {error}"
    return None


@contextmanager
def _nan_in_uninitialised_memory() -> Iterator[None]:
    """An element that a kernel forgets to write must show."""
    was_on = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
