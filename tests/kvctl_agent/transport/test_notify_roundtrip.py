"""The round-trip benchmark runs between two processes and prints its whole table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import kvctl_agent

SCRIPT = Path(kvctl_agent.__file__).parents[1] / "benchmarks" / "notify_roundtrip.py"


def test_prints_a_row_for_each_way_of_waiting_and_the_idle_cost(engine: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--transport", engine, "--count", "20", "--seconds", "0.2"],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith(engine)
    rows = lines[2:-2]
    assert [" ".join(row.split()[:-5]) for row in rows[::2]] == [
        "spinning",
        "50 µs sleeps",
        "100 µs sleeps",
        "adaptive",
    ]
    for row in rows:
        count, median, p99 = map(float, row.split()[-3:])
        assert count > 0
        assert 0 < median <= p99
    shares = [float(line.split()[-4].rstrip("%")) for line in lines[-2:]]
    # A spinning thread would show here; the idle rule itself is tested with agents, at the best of several tries.
    assert all(share < 50 for share in shares)
