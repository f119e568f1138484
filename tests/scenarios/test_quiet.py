"""A healthy fleet that is as busy as this machine allows: no health code says anything. benchmarks/quiet.py goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

QUIET = Path(__file__).parents[2] / "benchmarks" / "quiet.py"


@pytest.mark.timeout(400)
def test_nothing_is_found_where_nothing_is_wrong() -> None:
    done = subprocess.run(
        [sys.executable, QUIET, "--minutes", "0.3", "--transport", "loopback"],
        capture_output=True,
        text=True,
        timeout=390,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "; 0 false alarms; " in done.stdout
