"""The parent of the matrix processes: starts both, leads them step by step, with a deadline for every step."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from tests.matrix.matrix_rig.case import Case

STEP_S = 150.0
_MOST_FAILURES = 6  # after so many something is broken that the next case will not show better
_STACKS_S = 30.0
_LOG_BYTES = 6000
_ROOT = Path(__file__).parents[3]


class Failed(Exception):
    """A failed step, with its process."""


class Outcome(NamedTuple):
    """Amounts that a case transferred.

    Attributes:
        nbytes: compared with the expected contents.
        sent, landed: counters of the prefill and the decode role, by name and label.
    """

    nbytes: int
    sent: Counter[tuple[str, str]]
    landed: Counter[tuple[str, str]]


class Pair:
    """Both processes. After a failure they are ended, and the next case starts new ones.

    Attributes:
        moved: amounts of the cases that succeeded.
    """

    def __init__(self) -> None:
        self._processes: dict[str, _Process] = {}
        self._failures = 0
        self.moved: list[Outcome] = []

    def ensure(self) -> None:
        """Starts the processes that are not running."""
        if not self._processes:
            directory = Path(tempfile.mkdtemp(prefix="kv-", dir="/tmp"))
            self._processes = {role: _Process(role, directory) for role in ("prefill", "decode")}

    def run(self, case: Case) -> Outcome:
        """Runs one case.

        Raises:
            Failed: a step exceeded its deadline or failed, or bytes are wrong.
        """
        if self._failures >= _MOST_FAILURES:
            raise Failed(f"not run: {self._failures} cases have failed before it")
        self.ensure()
        try:
            outcome = self._run(case)
        except BaseException:
            self._failures += 1
            self.kill()
            raise
        self.moved.append(outcome)
        return outcome

    def _run(self, case: Case) -> Outcome:
        self._both("build", case)
        self._both("meet")
        counts = self._both("run")
        decode = self._processes["decode"]
        nbytes, problems = decode.finish(decode.begin("check"))
        if problems:
            raise Failed("\n".join(problems[:12]))
        self._both("close")
        return Outcome(nbytes, Counter(counts["prefill"]), Counter(counts["decode"]))

    def stop(self) -> None:
        """End both processes in an orderly way."""
        try:
            if self._processes:
                self._both("stop")
        finally:
            self.kill()

    def kill(self) -> None:
        """Kills both processes."""
        for process in self._processes.values():
            process.kill()
        self._processes = {}

    def _both(self, step: str, *args: Any) -> dict[str, Any]:
        """Runs a step in both processes at the same time."""
        deadlines = {role: process.begin(step, *args) for role, process in self._processes.items()}
        answers: dict[str, Any] = {}
        errors = []
        for role, process in self._processes.items():
            try:
                answers[role] = process.finish(deadlines[role])
            except Failed as error:
                errors.append(str(error))
        if errors:
            raise Failed("\n".join(errors))
        return answers


class _Process:
    def __init__(self, role: str, directory: Path) -> None:
        self._role = role
        self._directory = directory
        self._step = "start"
        self._log = directory / f"{role}.log"
        ours, theirs = socket.socketpair()
        environment = os.environ | {
            "MATRIX_DIRECTORY": str(directory),
            "KVCTL_SOCKET_DIR": str(directory),
            "PYTHONWARNINGS": "error",
            "OMP_NUM_THREADS": "1",
        }
        with theirs, self._log.open("wb") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "tests.matrix.matrix_rig.host", str(theirs.fileno()), role],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=_ROOT,
            )
        self._connection = Connection(ours.detach())

    def begin(self, step: str, *args: Any) -> float:
        """Sends a step; returns its deadline."""
        self._step = step
        self._send((step, args))
        return time.monotonic() + STEP_S

    def finish(self, deadline: float) -> Any:
        """Waits for the answer and returns it."""
        try:
            if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                self._child.send_signal(signal.SIGUSR1)  # all stacks go into the log
                self._wait_for_stacks()
                raise Failed(f"{self._role}: {self._step} took longer than {STEP_S:g} s\n{self._said()}")
            good, answer = self._connection.recv()
        except (EOFError, ConnectionError):
            code = self._child.wait(60)
            raise Failed(f"{self._role}: ended with {code} in {self._step}\n{self._said()}") from None
        if not good:
            raise Failed(f"{self._role}, {self._step}: {answer}")
        return answer

    def _wait_for_stacks(self) -> None:
        deadline = time.monotonic() + _STACKS_S
        while "most recent call first" not in self._said() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.1)  # all of them come at once

    def kill(self) -> None:
        self._connection.close()
        if self._step != "stop":
            self._child.kill()
        try:
            self._child.wait(60)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _send(self, message: object) -> None:
        try:
            self._connection.send(message)
        except (BrokenPipeError, ConnectionError):
            raise Failed(f"{self._role}: ended with {self._child.wait(60)}\n{self._said()}") from None

    def _said(self) -> str:
        return self._log.read_bytes()[-_LOG_BYTES:].decode(errors="replace")
