"""Finds the torch to build against, without importing it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HINT = (
    "torch_flash_mps is compiled against the torch it will run with, and this Python has none: "
    "run `pip install torch`, then `pip install --no-build-isolation .`"
)


@dataclass(frozen=True)
class TorchTree:
    """The installed (or unpacked) torch package in folder `root`."""

    root: Path

    @property
    def version(self) -> str:
        text = (self.root / "version.py").read_text()
        match = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
        if not match:
            raise ValueError(f"{self.root}/version.py: expected a line __version__ = '…', got none")
        return match[1]

    @property
    def include_dirs(self) -> list[Path]:
        include = self.root / "include"
        return [include, include / "torch" / "csrc" / "api" / "include"]

    @property
    def lib_dir(self) -> Path:
        return self.root / "lib"


def find_torch() -> TorchTree:
    """The torch of this interpreter; raises LookupError with a hint when there is none."""
    spec = importlib.util.find_spec("torch")
    origin = spec.origin if spec else _origin_outside_isolation()
    if not origin:
        raise LookupError(HINT)
    return TorchTree(Path(origin).parent)


def _origin_outside_isolation() -> str | None:
    """Asks the same interpreter without the variables that make up pip's build isolation."""
    isolation = ("PYTHONPATH", "PYTHONNOUSERSITE")
    env = {name: value for name, value in os.environ.items() if name not in isolation}
    find = "import importlib.util as u; s = u.find_spec('torch'); print(s.origin if s else '')"
    found = subprocess.run([sys.executable, "-c", find], env=env, capture_output=True, text=True)
    return found.stdout.strip() or None
