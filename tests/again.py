"""Runs pytest, and once more what failed where that was little: `python tests/again.py [what pytest takes]`.

These tests start hundreds of real processes; one that fails and then passes is unsteady, which is a bug to look into
and no reason to stop everything. So up to `FEW` failed tests run again, once, in a fresh process, whose status is then
ours. The first run's tracebacks stand above it. More failures, and every other end of a run, are final.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

FEW = 3


def main(arguments: list[str]) -> int:
    """The exit status of the last run."""
    with tempfile.TemporaryDirectory(prefix="kv-again-") as cache:
        # A cache of its own: what it says of failures is of this run and no other.
        command = [sys.executable, "-m", "pytest", *arguments, "-o", f"cache_dir={cache}"]
        status = subprocess.run(command, check=False).returncode
        failed = failures(Path(cache))
        if status != pytest.ExitCode.TESTS_FAILED or not 0 < len(failed) <= FEW:
            return status
        print(f"\ntests: {len(failed)} failed and run again, once. What passes now is unsteady, a bug to look into:")
        print("".join(f"tests: unsteady: {test}\n" for test in failed), flush=True)
        return subprocess.run([*command, "--last-failed", "--last-failed-no-failures=none"], check=False).returncode


def failures(cache: Path) -> list[str]:
    """Ids of the tests that failed, or whose fixtures did."""
    found = cache / "v" / "cache" / "lastfailed"
    return sorted(json.loads(found.read_text())) if found.exists() else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
