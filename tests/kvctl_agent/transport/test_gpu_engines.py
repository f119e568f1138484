"""The benchmark of engines with GPU memory: a rehearsal in host memory, and its message without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import kvctl_agent
from kvctl_agent.transport.nixl.binding import driver_cuda

SCRIPT = Path(kvctl_agent.__file__).parents[1] / "benchmarks" / "gpu_engines.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=250, check=False
    )


def test_a_rehearsal_writes_and_verifies_with_both_engines(tmp_path: Path) -> None:
    done = run("--rehearse", "--save", str(tmp_path / "engines.json"))
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads((tmp_path / "engines.json").read_bytes())["rows"]
    assert [(row["engine"], row["descriptors"], row["bytes"]) for row in rows] == [
        (engine, (16 << 20) // size, size) for engine in ("nixl", "mooncake") for size in (16 << 20, 256 << 10, 8 << 10)
    ]
    assert all(row["verified"] and row["gb_per_s"] > 0 for row in rows)
    assert len(done.stdout.splitlines()) == 7


@pytest.mark.skipif(driver_cuda() is not None, reason="there is a GPU")
def test_without_a_gpu_it_says_what_is_missing() -> None:
    done = run("--self-check")
    assert done.returncode == 3
    assert done.stderr.startswith("gpu_engines: ")
    assert "Traceback" not in done.stderr
