"""The plot of `bench`: a panel for each op, seqlen and time on logarithmic axes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from torch_flash_mps.cli.baselines import NAIVE, OURS, PYTORCH

if TYPE_CHECKING:
    from torch_flash_mps.cli.bench import Point

#: Colours that stay apart for colour-blind readers (Okabe and Ito 2008), and markers.
STYLES = {OURS: ("#0072B2", "o"), PYTORCH: ("#D55E00", "s"), NAIVE: ("#009E73", "^")}


def draw(points: Sequence[Point], title: str, machine: str, path: Path) -> None:
    """Writes the plot to `path`."""
    ops = list(dict.fromkeys(point.op for point in points))
    figure = Figure(figsize=(1.6 + 4.2 * len(ops), 5.4), layout="constrained")
    panels = figure.subplots(1, len(ops), squeeze=False)[0]
    for panel, op in zip(panels, ops, strict=True):
        rows = [point for point in points if point.op == op]
        for name, (colour, marker) in STYLES.items():
            _line(panel, [row for row in rows if name in row.timings], name, colour, marker)
        panel.set_title("decode (one query)" if op == "decode" else op)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        seqlens = sorted({row.seqlen for row in rows})
        panel.set_xticks(seqlens, [str(seqlen) for seqlen in seqlens])
        panel.xaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.set_xlabel("keys" if op == "decode" else "queries and keys")
        panel.grid(True, which="major", alpha=0.3)
    panels[0].set_ylabel("time of a call (ms)")
    lines = [textwrap.fill(line, 20 + 42 * len(ops)) for line in (*title.split("\n"), machine)]
    figure.suptitle("\n".join(lines), fontsize=11)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", frameon=False,
                  ncols=len(STYLES) if len(ops) > 1 else 1)
    figure.savefig(path, dpi=150, metadata={"Title": title, "Source": machine})


def _line(panel, rows: Sequence[Point], name: str, colour: str, marker: str) -> None:
    """Medians, with bars from quartile to quartile."""
    milliseconds = [row.timings[name].median * 1e3 for row in rows]
    below = [(row.timings[name].median - row.timings[name].lower) * 1e3 for row in rows]
    above = [(row.timings[name].upper - row.timings[name].median) * 1e3 for row in rows]
    panel.errorbar([row.seqlen for row in rows], milliseconds, yerr=[below, above], label=name,
                   color=colour, marker=marker, markersize=5, linewidth=1.5, capsize=3)
