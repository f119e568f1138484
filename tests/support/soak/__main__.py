"""`python -m tests.support.soak ARGS`: runs `tests.support.soak.run ARGS`, and disturbs it.

It sends random bytes to the sockets of ranks and of their observer, and kills the observer at random moments. Beside
it, servers are replaced under new names (`replaced_servers`, with the same transport, minutes and seed).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from kvctl_agent.contract.admin import OBSERVER_SOCKET
from tests.support.observers import observer_pid
from tests.support.socket_noise import SocketNoise

_FIRST_S, _MEAN_GAP_S = 20.0, 15.0  # start of the noise, when the ranks serve; mean time between two disturbances
_KILLED = 0.5  # probability that a disturbance of an observer is its end


def children(pid: int) -> list[int]:
    """Returns the process ids of a process's children; none if it has ended."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def disturb_observers(pids: list[int], draw: random.Random) -> None:
    """Sends random bytes to the observers of processes, or kills them."""
    for directory in filter(None, {socket_directory(pid) for pid in pids}):
        if draw.random() < _KILLED and (pid := observer_pid(directory)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        else:
            with socket.socket(socket.AF_UNIX) as stranger, contextlib.suppress(OSError):
                stranger.connect(os.fspath(directory / OBSERVER_SOCKET))
                stranger.sendall(draw.randbytes(draw.randrange(4096)))


def socket_directory(pid: int) -> Path | None:
    """Returns the socket directory that a process has from its environment; None if it has ended, or sets none."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    name = b"KVCTL_SOCKET_DIR="
    return next((Path(os.fsdecode(each.removeprefix(name))) for each in variables if each.startswith(name)), None)


def main(arguments: list[str]) -> int:
    """Runs a soak, disturbs its ranks while it runs, and returns its exit status, or that of the replacements."""
    run = subprocess.Popen([sys.executable, "-m", "tests.support.soak.run", *arguments])
    replaced = subprocess.Popen([sys.executable, "-m", "tests.support.replaced_servers", *arguments])
    seed = arguments[arguments.index("--seed") + 1] if "--seed" in arguments else "0"
    draw, noise = random.Random(f"soak {seed}"), SocketNoise(int(seed))
    next_at = time.monotonic() + _FIRST_S
    try:
        while run.poll() is None:
            time.sleep(0.2)
            if time.monotonic() >= next_at and (pids := children(run.pid)):
                next_at = time.monotonic() + draw.expovariate(1 / _MEAN_GAP_S)
                noise.make(draw.choice(pids))
                disturb_observers(pids, draw)
    except KeyboardInterrupt:
        pass  # the terminal has sent SIGINT to the soak as well
    finally:
        noise.close()
    status = run.wait()
    return replaced.wait() or status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
