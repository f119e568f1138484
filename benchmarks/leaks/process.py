"""Child process with the agents of one role: requests, answers, and the resources that the kernel reports for it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.leaks.census import Sizes

SIDE = Path(__file__).with_name("side.py")
REPOSITORY = Path(__file__).resolve().parents[2]

# Small limits, so that histories fill up and tombstones expire early.
CONFIG: dict[str, Any] = {
    "staging_buffer_mb": 4,
    "staging_ring_mb": 1,
    "path": "staged",
    "resend_s": 0.2,
    "history_rooms": 32,
    "failed_rooms": 32,
    "timeline_events": 32,
    "recorder_events": 64,
}


class SideProcess:
    """Child process that runs `side.py`; a request is the name of a method of `Side`."""

    def __init__(self, role: str, sizes: dict[str, int], directory: Path, **config: Any) -> None:
        self.role = role
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        arguments = {
            "role": role,
            "sizes": sizes,
            "name": role,
            "bootstrap": f"ipc://{directory}/boot",
            "config": {**CONFIG, **config},
        }
        scratch = directory / "tmp"
        scratch.mkdir(exist_ok=True)
        environment = {"KVCTL_SOCKET_DIR": str(directory), "TMPDIR": str(scratch), "PYTHONPATH": str(REPOSITORY)}
        self.process = subprocess.Popen(
            [sys.executable, str(SIDE), json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, **environment},
            text=True,
        )

    def tell(self, do: str, **fields: Any) -> None:
        """Sends a request without waiting for its answer, which `hear` returns."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            raise RuntimeError(f"the {self.role} side ended with {self.process.returncode}:\n{self.said()}")
        return json.loads(line)["answer"]

    def ask(self, do: str, **fields: Any) -> Any:
        self.tell(do, **fields)
        return self.hear()

    def said(self) -> str:
        """Returns the stderr of the process so far."""
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace")

    def kill(self) -> None:
        """Kills the process; does nothing if it has ended."""
        self.process.kill()
        self.end()

    def end(self, timeout: float = 15.0) -> int:
        """Closes the stdin of the process, waits until it exits, and returns its exit status.

        Raises:
            subprocess.TimeoutExpired: the process did not exit in time and was killed.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
            return self.process.wait(timeout)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            self.process.stdout.close()
            self._stderr.close()

    # ---- kernel statistics --------------------------------------------------------------------------------------

    @property
    def rss_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def threads(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))

    def descriptors(self) -> Sizes:
        """Counts open file descriptors by kind: sockets, pipes, files by path."""
        kinds: Counter[str] = Counter()
        for link in Path(f"/proc/{self.process.pid}/fd").iterdir():
            try:
                target = str(link.readlink())
            except FileNotFoundError:  # was closed after iterdir listed it
                continue
            kinds[re.sub(r":\[\d+\]$", "", target)] += 1
        return dict(kinds)

    def shared_memory(self) -> set[str]:
        """Returns the names of the process's files in /dev/shm, which must be gone when the process has ended."""
        lines = Path(f"/proc/{self.process.pid}/maps").read_text().splitlines()
        return {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")}


def files(directory: Path) -> Sizes:
    """Counts the files in the fleet's directory, by kind: sockets, and other files by folder."""
    kinds = Counter(
        "sockets" if path.is_socket() else f"files in {path.parent.name}"
        for path in directory.rglob("*")
        if not path.is_dir()
    )
    return dict(kinds)
