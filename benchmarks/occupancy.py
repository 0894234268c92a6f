"""How many threadgroups a decode step puts in flight, on Macs from M1 to M4 Max."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.counting import Bars, table
from torch_flash_mps import _extension

SEQLEN_K = 8192
NUM_HEADS_KV = (1, 8)


@dataclass(frozen=True)
class Chip:
    """One chip, in all its numbers of cores."""

    name: str
    family: int           # N of Apple's GPU family AppleN
    cores: tuple[int, ...]


CHIPS = (
    Chip("M1", 7, (7, 8)),
    Chip("M1 Pro", 7, (14, 16)),
    Chip("M1 Max", 7, (24, 32)),
    Chip("M2", 8, (8, 10)),
    Chip("M2 Pro", 8, (16, 19)),
    Chip("M2 Max", 8, (30, 38)),
    Chip("M3", 9, (8, 10)),
    Chip("M3 Pro", 9, (14, 18)),
    Chip("M3 Max", 9, (30, 40)),
    Chip("M4", 9, (8, 10)),
    Chip("M4 Pro", 9, (16, 20)),
    Chip("M4 Max", 9, (32, 40)),
)
HEADER = ("chip", "family", "cores", *(
    f"Hkv {heads}: {what}" for heads in NUM_HEADS_KV for what in ("splits", "threadgroups")))


def section() -> tuple[str, list[str]]:
    """The table, and the chips that are not filled."""
    bars, rows = Bars(), []
    for chip in CHIPS:
        for cores in chip.cores:
            row = [chip.name, f"Apple{chip.family}", str(cores)]
            for heads in NUM_HEADS_KV:
                splits = _extension.extension().num_splits(1, heads, SEQLEN_K, chip.family, cores)
                threadgroups = heads * splits
                row += [str(splits), str(threadgroups)]
                bars.check(f"{chip.name}, {cores} cores, Hkv {heads}",
                           "cores without a threadgroup", max(cores - threadgroups, 0), 0)
            rows.append(row)
    return f"B 1, Sk {SEQLEN_K}\n\n{table(HEADER, rows, 2)}", bars.broken
