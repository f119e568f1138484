"""The arrival benchmark runs between two processes and prints its whole table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import kvctl_agent

SCRIPT = Path(kvctl_agent.__file__).parents[1] / "benchmarks" / "mooncake_arrival.py"


def test_prints_a_row_for_each_way_and_size() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--count", "20"], capture_output=True, text=True, timeout=250, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = done.stdout.splitlines()[1:]
    assert len(rows) == 9
    assert {row.split("  ")[0] for row in rows} == {"TransferNotify", "own link", "own link, spun"}
    for row in rows:
        count, median, p99, cpu = map(float, row.split()[-4:])
        assert count == 20
        assert 0 < median <= p99
        assert cpu > 0
