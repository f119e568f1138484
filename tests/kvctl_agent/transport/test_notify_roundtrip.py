"""The round-trip benchmark runs between two processes and prints its whole table."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import kvctl_agent

SCRIPT = Path(kvctl_agent.__file__).parents[1] / "benchmarks" / "notify_roundtrip.py"


def measured(engine: str) -> list[str]:
    """Returns the lines that the benchmark prints."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--transport", engine, "--count", "20", "--seconds", "0.2"],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_prints_a_row_for_each_way_of_waiting_and_the_idle_cost(
    engine: str, at_best: Callable[[Callable[[], float], float], None]
) -> None:
    lines = measured(engine)
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
    runs = [lines]

    def idle_percent() -> float:
        """Returns the larger share of a core; one second of a busy machine may show more than an idle agent takes."""
        return max(float(line.split()[-4].rstrip("%")) for line in (runs.pop() if runs else measured(engine))[-2:])

    at_best(idle_percent, 3)
