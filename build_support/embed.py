"""Turns metal/*.metal into one C++ file of string constants, each with its includes in place."""

from __future__ import annotations

import re
import sys
from pathlib import Path

_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"\s*$')
_DELIMITER = "metal_source"
_HEADER = '#include "metal_sources.h"\n\nnamespace flash_mps {\n'
_FOOTER = '  throw std::out_of_range("no Metal source named " + std::string(name));\n}\n\n}\n'


def flatten(path: Path, seen: set[Path] | None = None) -> str:
    """The text of `path` with each `#include "…"` replaced by that file, once when it says so.

    `#line` directives keep the positions in compiler messages those of the original files.
    """
    seen = set() if seen is None else seen
    lines = [f'#line 1 "{path.name}"']
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        include = _INCLUDE.match(line)
        if include:
            target = (path.parent / include[1]).resolve()
            if target not in seen:
                lines += [flatten(target, seen), f'#line {number + 1} "{path.name}"']
            else:
                lines.append("")
        elif line.strip() == "#pragma once":
            seen.add(path.resolve())
            lines.append("")
        else:
            lines.append(line)
    return "\n".join(lines)


def main(output: str, *sources: str) -> None:
    text = [_HEADER, "std::string_view metal_source(std::string_view name) {"]
    for source in sorted(Path(name) for name in sources):
        literal = f'R"{_DELIMITER}({flatten(source)}\n){_DELIMITER}"'
        text.append(f'  if (name == "{source.stem}") return {literal};')
    Path(output).write_text("\n".join([*text, _FOOTER]))


if __name__ == "__main__":
    main(*sys.argv[1:])
