"""A table that a script makes and that a document has between two markers."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class GeneratedTable:
    """`make()` gives the table as Markdown; `name` is that of the markers in `document`."""

    document: Path
    name: str
    make: Callable[[], str]

    def _parts(self) -> tuple[str, str, str]:
        before, rest = self.document.read_text().split(f"<!-- {self.name}: begin -->")
        table, after = rest.split(f"<!-- {self.name}: end -->")
        return before, table, after

    def in_document(self) -> str:
        return self._parts()[1].strip()

    def write(self) -> None:
        before, _, after = self._parts()
        begin, end = (f"<!-- {self.name}: {edge} -->" for edge in ("begin", "end"))
        self.document.write_text(f"{before}{begin}\n{self.make()}\n{end}{after}")

    def main(self, description: str) -> None:
        """The command line of the script: prints the table, or with --write replaces it."""
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--write", action="store_true", help=f"replace it in {self.document}")
        if parser.parse_args().write:
            self.write()
        else:
            print(self.make())


def markdown(*lines: Sequence[str]) -> str:
    """Header and rows as a Markdown table."""
    header, *rows = lines
    rule = ("---",) * len(header)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *rows))
