"""The examples run as a user runs them, and their own checks pass."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def _run(name, *arguments):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True, text=True, timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_generate():
    text = _run("generate.py", "--max-new-tokens", "6")
    assert "6 generated, the same as eager" in text
    calls, expected = map(int, re.search(r"(\d+) of (\d+) attention calls", text).groups())
    assert calls == expected == 30 * 6
    assert float(re.search(r"largest difference (\S+)", text)[1]) < 1e-2


def test_embed():
    text = _run("embed.py")
    assert float(re.search(r"smallest cosine (\S+)", text)[1]) > 0.99999
    assert float(re.search(r"largest difference (\S+),", text)[1]) < 1e-4


def test_finetune():
    """Two steps; examples/finetune.py itself fails where a loss differs or a kernel did not run."""
    text = _run("finetune.py", "--steps", "2", "--length", "16")
    assert "60 of 60 attention calls, 60 backward" in text
    assert float(re.search(r"largest relative difference (\S+)", text)[1]) < 1e-4
