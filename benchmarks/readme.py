"""Keeps the numbers in benchmarks/README.md those that a command printed."""

import re
from pathlib import Path

README = Path(__file__).with_name("README.md")


def rewrite_section(name: str, text: str) -> None:
    """Puts `text` between the lines `<!-- name -->` and `<!-- end name -->`."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
    before = README.read_text()
    after, count = pattern.subn(lambda match: f"{match[1]}{text.strip()}\n{match[2]}", before)
    if count != 1:
        raise ValueError(f"{README.name}: expected one section {name!r}, got {count}")
    README.write_text(after)
