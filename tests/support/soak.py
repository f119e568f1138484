"""`python -m tests.support.soak ARGS`: runs `kvctl demo ARGS` and sends random bytes to its ranks' sockets.

Beside it, servers are replaced under new names (`replaced_servers`, with the same transport, minutes and seed).
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

from tests.support.socket_noise import SocketNoise

_FIRST_S, _MEAN_GAP_S = 20.0, 15.0  # start of the noise, when the ranks serve; mean time between two disturbances


def children(pid: int) -> list[int]:
    """Returns the process ids of a process's children; none if it has ended."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def main(arguments: list[str]) -> int:
    """Runs `kvctl demo`, disturbs its ranks while it runs, and returns its exit status, or that of the replacements."""
    demo = subprocess.Popen([sys.executable, "-m", "kvctl", "demo", *arguments])
    replaced = subprocess.Popen([sys.executable, "-m", "tests.support.replaced_servers", *arguments])
    seed = arguments[arguments.index("--seed") + 1] if "--seed" in arguments else "0"
    draw, noise = random.Random(f"soak {seed}"), SocketNoise(int(seed))
    next_at = time.monotonic() + _FIRST_S
    try:
        while demo.poll() is None:
            time.sleep(0.2)
            if time.monotonic() >= next_at and (pids := children(demo.pid)):
                next_at = time.monotonic() + draw.expovariate(1 / _MEAN_GAP_S)
                noise.make(draw.choice(pids))
    except KeyboardInterrupt:
        pass  # the terminal has sent SIGINT to the demo as well
    finally:
        noise.close()
    status = demo.wait()
    return replaced.wait() or status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
