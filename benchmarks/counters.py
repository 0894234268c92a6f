"""Counts the work of our kernels on the simulated device: forward, backward or decode, or what
windows, score modifiers and masks change in all of them.

A count is the same on every machine. All kernels run in checked mode in this one process, on the
same inputs, and no count of a wrong result is printed. The exit status says whether ours keep the
bars: `broken_bars` of the modules that count one op each, that of unfused.py, and occupancy.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from benchmarks import (  # noqa: E402
    counters_bwd,
    counters_decode,
    counters_fwd,
    counters_mask,
    counters_score,
    counters_varlen,
    unfused,
)
from benchmarks.counting import SHAPES, table  # noqa: E402
from benchmarks.readme import rewrite_section  # noqa: E402

Section = tuple[str, list[str]]   # a text with a table, and the bars that ours breaks


def work_section(counters: ModuleType) -> Section:
    """The work of one op on every shape."""
    rows, broken = [], []
    for case in SHAPES:
        print(f"{case.id} ...", file=sys.stderr)
        works = counters.measure(case)
        rows += [counters.row(work) for work in works]
        broken += counters.broken_bars(works)
    lines = table(counters.HEADER, rows, counters.NUM_NAMES)
    return f"B 1, Hq 2, float16; {counters.versions()}\n\n{lines}", broken


SECTIONS: dict[str, Callable[[], dict[str, Section]]] = {
    "fwd": lambda: {"counters fwd": work_section(counters_fwd)},
    "bwd": lambda: {"counters bwd": work_section(counters_bwd), "unfused": unfused.section()},
    "decode": counters_decode.sections,
    "score": counters_score.sections,
    "varlen": counters_varlen.sections,
    "mask": counters_mask.sections,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", choices=SECTIONS, default="fwd")
    parser.add_argument("--write", action="store_true", help="also put the tables in README.md")
    options = parser.parse_args()
    sections = SECTIONS[options.op]()
    print("\n\n".join(text for text, _ in sections.values()), end="\n\n")
    broken = [sentence for _, of_section in sections.values() for sentence in of_section]
    print("\n".join(broken) or "Ours keep every bar.")
    if options.write and not broken:
        for name, (text, _) in sections.items():
            rewrite_section(name, f"`python benchmarks/counters.py --op {options.op}`: {text}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
