"""A run in which tests were skipped is not green on the simulated device."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PASSING = "def test_passes(): pass\n"
SKIPPED = "import pytest\n@pytest.mark.skip(reason='planted')\ndef test_is_skipped(): pass\n"


@pytest.mark.parametrize("skips", [False, True])
def test_BD_07_a_skip_makes_the_run_fail(tmp_path, skips):
    shutil.copy(Path(__file__).parent / "conftest.py", tmp_path)
    (tmp_path / "test_planted.py").write_text(PASSING + SKIPPED * skips)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True, text=True, cwd=tmp_path,
    )
    must_fail = skips and sys.platform != "darwin"
    assert done.returncode == int(must_fail), done.stdout
    assert ("1 tests were skipped on the simulated device; the budget is 0" in done.stdout) == (
        must_fail
    )
