"""Fixtures that run `kvctl demo` as a user does: real processes, and a socket directory per fleet."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

KVCTL = (sys.executable, "-m", "kvctl")
# A room that is stuck is named when its time is half over; the rest is for a machine with other things to do.
PATIENCE_S = 200.0
POLL_S = 0.5  # between two commands, each of which costs a process and an answer of every rank

# The fewest ranks that show it: all of them share this machine.
_SLOW: dict[str, tuple[str, ...]] = {
    "pinned-ring": ("--transport", "nixl"),
    "stuck-room": ("--transport", "loopback"),
    "bootstrap": ("--transport", "loopback"),
    "grant-loss": ("--transport", "loopback", "--prefill-tp", "1", "--decode-dp", "1"),
    "gated-empty": ("--transport", "loopback"),
    "stuck-waiting": ("--transport", "loopback", "--decode-dp", "1"),
    "stuck-scatter": ("--transport", "loopback", "--prefill-tp", "1", "--decode-dp", "1"),
}

Finding = dict[str, Any]


class Demo:
    """One `kvctl demo` process and commands that observe it.

    Attributes:
        lines: its stderr so far.
    """

    def __init__(self, *options: str) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="kv-", dir="/tmp"))
        self._environment = {**os.environ, "KVCTL_SOCKET_DIR": str(self._directory), "KVCTL_CONFIG": "/dev/null"}
        self._process = subprocess.Popen(
            [*KVCTL, "demo", "--seed", "3", *options],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        self.lines.extend(self._process.stderr)  # line by line, as they come

    def kvctl(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Runs another command against this fleet."""
        return subprocess.run(
            [*KVCTL, *args], env=self._environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )

    def said(self, text: str) -> str:
        """Waits for a line of stderr that contains this text, and return it."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := [line for line in self.lines if text in line]):
            assert self._process.poll() is None, f"the demo has ended: {''.join(self.lines)}"
            assert time.monotonic() < deadline, f"the demo never said {text!r}: {''.join(self.lines)}"
            time.sleep(0.05)
        return found[0]

    def diagnosed(self, code: str, of: str = ".*") -> Finding:
        """Waits until the first finding of `kvctl doctor` has this code and a matching subject, and returns it."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            done = self.kvctl("doctor", "-o", "json")
            assert done.stdout, done.stderr
            rows: list[Finding] = [
                row for row in json.loads(done.stdout)["data"] if str(row.get("code", "")).startswith("KV_")
            ]
            if rows and rows[0]["code"] == code and re.fullmatch(of, rows[0]["subject"]):
                assert done.returncode == 1
                return rows[0]
            time.sleep(POLL_S)
            assert time.monotonic() < deadline, (
                f"doctor never said {code} of {of!r} first, but {[(row['code'], row['subject']) for row in rows]}"
            )

    def until_status_names(self, code: str, agent: str) -> None:
        """Waits until `kvctl status` shows this code for an agent."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            rows = json.loads(self.kvctl("status", "-o", "json").stdout)["data"]
            health = {row["name"]: row["health"] for row in rows}
            if code in health.get(agent, ()):
                return
            time.sleep(POLL_S)
            assert time.monotonic() < deadline, f"status never said {code} of {agent}, but {health}"

    def shows(self, found: Finding, *patterns: str, rc: int = 0) -> str:
        """Runs the command that a finding recommends, and check that its output matches each of the patterns.

        There is no terminal here: a command that asks for confirmation gets `--yes`, one that displays data gets `-o
        table`.
        """
        words = shlex.split(found["next"])
        if words[:2] in (["kvctl", "resume"], ["kvctl", "drain"]) or words[1:3] == ["staging", "release"]:
            words.append("--yes")
        if words[0] == "kvctl":
            words = [*KVCTL, *words[1:], *(() if "-o" in words else ("-o", "table"))]
        done = subprocess.run(
            words, env=self._environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == rc, (found["next"], done.returncode, done.stdout, done.stderr)
        for pattern in patterns:
            assert re.search(pattern, done.stdout), (found["next"], pattern, done.stdout, done.stderr)
        return done.stdout

    def close(self) -> int:
        """Interrupt it (SIGINT) and return its exit code."""
        self._process.send_signal(signal.SIGINT)
        try:
            return self._process.wait(PATIENCE_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._reader.join()
            assert self._process.stderr is not None
            self._process.stderr.close()
            left = sorted(path.name for path in self._directory.iterdir())
            shutil.rmtree(self._directory)
            assert left == [], f"the demo left {left}"


@pytest.fixture(scope="module")
def begun() -> Iterator[dict[str, Demo]]:
    """Demos whose fault takes long to show, by scenario, started before the first test."""
    made: dict[str, Demo] = {}
    try:
        for scene, options in _SLOW.items():
            made[scene] = Demo("--fault", scene, *options)
        yield made
    finally:
        codes = {scene: each.close() for scene, each in made.items()}
    assert set(codes.values()) == {130}


@pytest.fixture
def demo() -> Iterator[Callable[..., Demo]]:
    """Starts a demo that ends with the test."""
    made: list[Demo] = []

    def start(*options: str) -> Demo:
        made.append(Demo(*options))
        return made[-1]

    yield start
    assert [each.close() for each in made] == [130] * len(made)
