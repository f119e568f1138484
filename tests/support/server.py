"""`python -m tests.support.server ROLE NAME TRANSPORT`: a server of one rank, which transfers the rooms it is told.

A prefill server prints its registry's endpoint. A line "ROOM" has it send a room, "ROOM claim" only announce it. A
decode server prints "ready"; a line "ROOM ENDPOINT" has it receive a room, of which it prints the state. "close" or the
end of the input ends either.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kvctl_agent import Agent, KVPool, Rank

CONFIG: dict[str, Any] = {
    "staging_ring_mb": 4,
    "staging_buffer_mb": 4,
    "heartbeat_s": 0.1,
    "suspect_s": 0.8,
    "lost_s": 1.5,
    "bootstrap_timeout_s": 2.0,
}
SENT_PAGE, RECEIVED_PAGE = 1, 3
_WAIT_S = 60.0


def pool() -> KVPool:
    """Returns a small pool, of which each page holds the number of the page."""
    rows = np.repeat(np.arange(64, dtype=np.float16), 16)[:, None, None] * np.ones((1, 2, 16), np.float16)
    return KVPool.from_tensors([rows.copy()], [rows.copy()], page_size=16, total_kv_heads=2)


class Server:
    """A server in a process of its own.

    Attributes:
        endpoint: of a prefill server's registry.
    """

    def __init__(self, role: str, name: str, transport: str, directory: Path) -> None:
        """Starts the server and waits until it runs.

        Args:
            directory: for its admin socket, which a process that is killed leaves there.
        """
        command = [sys.executable, "-m", "tests.support.server", role, name, transport]
        environment, pipe = os.environ | {"KVCTL_SOCKET_DIR": str(directory)}, subprocess.PIPE
        self.process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        self.endpoint = self.read()

    def read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, "the server has ended"
        return line

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def end(self, how: str) -> None:
        """Ends the process: "close" properly, "kill" at once."""
        if how == "close":
            self.say("close")
        else:
            self.process.kill()
        self.process.wait(_WAIT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def main() -> None:
    role, name, transport = sys.argv[1:]
    registry = "tcp://127.0.0.1:0" if role == "prefill" else None
    agent = Agent(role=role, rank=Rank(), pool=pool(), name=name, bootstrap=registry, transport=transport, **CONFIG)
    with agent.start():
        print(agent.bootstrap or "ready", flush=True)
        for line in sys.stdin:
            room, *words = line.split()
            if room == "close":
                break
            if role == "decode":
                receive = agent.receive(int(room), [RECEIVED_PAGE], prefill=words[0])
                print(receive.wait(_WAIT_S).name, flush=True)
                continue
            send = agent.send(int(room))
            if not words:
                send.pages([SENT_PAGE], last=True)
                send.finish()


if __name__ == "__main__":
    main()
