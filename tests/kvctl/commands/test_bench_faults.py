"""`kvctl bench --faults` as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

LAYOUT = ["--transport", "loopback", "--prefill-tp", "2", "--decode-dp", "2", "--path", "staged"]
LOAD = ["--layers", "2", "--kv-heads", "4", "--head-dim", "16", "--tokens", "16..90", "--concurrency", "12"]


@pytest.fixture
def bench(socket_dir: Path, socket_directory: Path):
    """Runs it to its end; nothing of it may stay."""

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        temporary = socket_dir / "t"
        temporary.mkdir(exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-m", "kvctl", "bench", *LAYOUT, *LOAD, *options],
            capture_output=True,
            text=True,
            timeout=250,
            env={**os.environ, "TMPDIR": str(temporary), "NO_COLOR": "1"},
        )
        assert [*temporary.iterdir(), *socket_directory.iterdir()] == []
        return done

    return run


def test_what_faults_explain_is_counted_and_the_rest_verifies(bench, tmp_path: Path):
    saved = tmp_path / "result.json"
    done = bench(
        "--rooms",
        "100",
        "--seed",
        "3",
        "--faults",
        "abort=60%,write-error=5%,control-loss=2%,pause=decode-1@100ms+300ms",
        "--save",
        str(saved),
        "-o",
        "table",
    )
    assert (done.returncode, done.stderr) == (0, "")
    (run,) = orjson.loads(saved.read_bytes())["runs"]
    assert run["faults"] == ["abort=60%", "write-error=5%", "control-loss=2%", "pause=decode-1@100ms+300ms"]
    assert run["rooms"] == run["ok"] + run["aborted"] + run["failed_by_fault"] == 100
    assert (run["failed"], run["verified"]) == (0, True)
    assert run["aborted"] > 0
    assert run["failed_by_fault"] > 0
    assert run["faults_struck"]["control-loss"] > 0
    assert "with --seed 3" in done.stdout
    assert "every byte verified" in done.stdout


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("kill=decode-0@1s", "kvctl demo kills and restarts"),
        ("replace=prefill-1@1s+5s", "kvctl demo kills and restarts"),
        ("pause=decode-7@1s+1s", "there is no rank decode-7"),
        ("control-los=5%", "did you mean control-loss"),
    ],
)
def test_faults_that_cannot_be_are_refused_before_anything_starts(bench, spec: str, says: str):
    done = bench("--rooms", "4", "--faults", spec)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
