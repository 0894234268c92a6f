"""How the benchmarks time: warm up by wall time, interleave what is compared, report the median."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

WARM_UP_SECONDS = 0.5


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median and the quartiles around it."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        if len(seconds) == 1:
            return cls(seconds[0], seconds[0], seconds[0])
        lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, lower, upper)

    def __str__(self) -> str:
        return f"{self.median * 1e3:.3g} ms ({self.lower * 1e3:.3g} to {self.upper * 1e3:.3g})"


def interleaved(
    calls: dict[str, Callable[[], object]],
    synchronize: Callable[[], None],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
    warm_up_seconds: float = WARM_UP_SECONDS,
) -> dict[str, Timing]:
    """Times each call `repeats` times, taking turns, so that a slow spell hits all alike.

    A time spans the call and the wait for its result.
    """
    for call in calls.values():
        _warm_up(call, synchronize, warm_up_seconds)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = clock()
            call()
            synchronize()
            seconds[name].append(clock() - start)
    return {name: Timing.of(samples) for name, samples in seconds.items()}


def overhead(
    calls: dict[str, Callable[[], object]],
    synchronize: Callable[[], None],
    repeats: int,
    calls_per_sample: int = 20,
) -> dict[str, Timing]:
    """Time until a call returns, before its result is there; the samples are means."""
    for call in calls.values():
        _warm_up(call, synchronize)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(calls_per_sample):
                call()
            seconds[name].append((time.perf_counter() - start) / calls_per_sample)
            synchronize()
    return {name: Timing.of(samples) for name, samples in seconds.items()}


def _warm_up(call: Callable[[], object], synchronize: Callable[[], None],
             seconds: float = WARM_UP_SECONDS) -> None:
    """At least one call: the first compiles the kernel. By time, for a GPU's clock rises slowly."""
    start = time.perf_counter()
    while True:
        call()
        synchronize()
        if time.perf_counter() - start >= seconds:
            return
