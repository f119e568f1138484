"""Prefill and decode servers that are replaced under new names, and dead ones that requests name, for minutes.

One decode agent and one prefill server stay. At the end they must hold no more than at the beginning, know no peer and
have no critical finding.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvctl_agent import Agent, KVPool, Rank, RoomState
from tests.support.server import CONFIG, RECEIVED_PAGE, SENT_PAGE, Server

_WAIT_S = 60.0
_FIRST = 6  # of each kind, until as much is held as will be held in all
_GROWTH_BYTES = 24 << 20
_GROWTH_DESCRIPTORS = 4
_DEAD = 40
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Held(NamedTuple):
    """Number of descriptors and bytes of resident memory of a process."""

    descriptors: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.descriptors} descriptors, {self.bytes >> 20} MiB"

    def exceeds(self, other: Held) -> bool:
        more = self.descriptors - other.descriptors, self.bytes - other.bytes
        return more[0] > _GROWTH_DESCRIPTORS or more[1] > _GROWTH_BYTES


def held(pid: int) -> Held:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return Held(len([*Path(f"/proc/{pid}/fd").iterdir()]), pages * _PAGE_BYTES)


class Replacements:
    """The servers that stay, and the events that replace the others; a `draw` decides what happens."""

    def __init__(self, transport: str, draw: random.Random, directory: Path, stack: ExitStack) -> None:
        self._transport, self._draw, self._directory, self._stack = transport, draw, directory, stack
        self._rooms = 0
        self.counts: Counter[str] = Counter()
        self._keys = np.zeros((1024, 2, 16), np.float16)
        own = KVPool.from_tensors([self._keys], [np.zeros_like(self._keys)], page_size=16, total_kv_heads=2)
        self.decode = Agent(role="decode", rank=Rank(), pool=own, name="decode-stays", transport=transport, **CONFIG)
        stack.enter_context(self.decode.start())
        self.prefill = self._start("prefill", "prefill-stays")
        self.kinds = (self.prefill_replaced, self.decode_replaced, self.prefill_frozen, self.dead_named)

    def _start(self, role: str, name: str) -> Server:
        server = Server(role, name, self._transport, self._directory)
        self._stack.callback(server.process.kill)
        return server

    def _room(self) -> int:
        self._rooms += 1
        return self._rooms

    def happen(self) -> None:
        kind = self.kinds[sum(self.counts.values()) % len(self.kinds)]
        self.counts[kind.__name__] += 1
        kind(f"{kind.__name__}-{self.counts[kind.__name__]}")

    def _serve(self, server: Server) -> None:
        """Receives a room of a prefill server and compares its bytes."""
        room = self._room()
        self._keys[:] = 0
        receive = self.decode.receive(room, [RECEIVED_PAGE], prefill=server.endpoint)
        server.say(str(room))
        state = receive.wait(_WAIT_S)
        if state is not RoomState.SUCCESS:
            raise AssertionError(f"room {room} of {server.endpoint}: {state.name} {receive.error}")
        if not (self._keys[RECEIVED_PAGE * 16 : (RECEIVED_PAGE + 1) * 16] == SENT_PAGE).all():
            raise AssertionError(f"room {room} of {server.endpoint}: SUCCESS with other bytes")

    def prefill_replaced(self, name: str) -> None:
        server = self._start("prefill", name)
        self._serve(server)
        server.end(self._draw.choice(("close", "kill")))

    def decode_replaced(self, name: str) -> None:
        server = self._start("decode", name)
        room = self._room()
        server.say(f"{room} {self.prefill.endpoint}")
        self.prefill.say(str(room))
        if (state := server.read()) != "SUCCESS":
            raise AssertionError(f"room {room} of {name}: {state}")
        server.end(self._draw.choice(("close", "kill")))

    def prefill_frozen(self, name: str) -> None:
        """It is frozen with a room in flight for as long as it takes to be forgotten, or shorter, and serves again."""
        server = self._start("prefill", name)
        self._serve(server)
        room = self._room()
        receive = self.decode.receive(room, [RECEIVED_PAGE + 1], prefill=server.endpoint)
        server.say(f"{room} claim")
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(self._draw.uniform(0.5, CONFIG["lost_s"] + CONFIG["bootstrap_timeout_s"] + 2))
        server.process.send_signal(signal.SIGCONT)
        receive.abort("for the test")
        deadline = time.monotonic() + _WAIT_S
        while not receive.released:
            if time.monotonic() > deadline:
                raise AssertionError(f"room {room} of {name} was not released: {receive.error}")
            time.sleep(0.05)
        self._serve(server)
        server.end(self._draw.choice(("close", "kill")))

    def dead_named(self, name: str) -> None:
        ports = [self._draw.randint(1, 1023) for _ in range(_DEAD)]
        for number, port in enumerate(ports):
            self.decode.receive(self._room(), [], prefill=f"tcp://127.0.{number}.9:{port}")
        server = self._start("prefill", name)
        self._serve(server)
        server.end("close")

    def held(self) -> dict[str, Held]:
        return {"decode-stays": held(os.getpid()), "prefill-stays": held(self.prefill.process.pid)}

    def rest(self) -> list[str]:
        """Waits until nothing is known of servers that have ended; returns complaints."""
        deadline = time.monotonic() + 10 * CONFIG["bootstrap_timeout_s"]
        while time.monotonic() < deadline and (self.decode.machine.instances or self._peers()):
            time.sleep(0.5)
        found = [f"decode-stays knows {name}" for name in self.decode.machine.instances]
        found += [f"{row['agent']} knows {row['peer']} ({row['state']})" for row in self._peers()]
        findings = [row for row in self._kvctl("health") if row["severity"] == "critical"]
        return found + [f"{row['code']} {row['subject']}: {row['cause']}" for row in findings]

    def _peers(self) -> list[dict[str, Any]]:
        return self._kvctl("peers")

    def _kvctl(self, *arguments: str) -> list[dict[str, Any]]:
        command = [sys.executable, "-m", "kvctl", *arguments, "-o", "json"]
        environment = os.environ | {"KVCTL_SOCKET_DIR": str(self._directory)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_WAIT_S)
        if not done.stdout:
            raise AssertionError(f"{' '.join(command)}: {done.stderr}")
        rows: list[dict[str, Any]] = json.loads(done.stdout)["data"]
        return rows


def main(arguments: list[str] | None = None) -> int:
    """Replaces servers for some minutes; the exit status is 1 if one that stays has kept something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", default="nixl")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", default="0")
    given, _ = parser.parse_known_args(arguments)
    ends = time.monotonic() + 60 * given.minutes
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp")))
        os.environ["KVCTL_SOCKET_DIR"] = str(directory)
        os.environ["KVCTL_BLACK_BOX_S"] = "0"  # those of servers that are killed here are findings of their own
        world = Replacements(given.transport, random.Random(f"replaced {given.seed}"), directory, stack)
        before: dict[str, Held] = {}
        complaints: list[str] = []
        while time.monotonic() < ends or not before:
            world.happen()
            if not before and min(world.counts.values()) >= _FIRST and len(world.counts) == len(world.kinds):
                complaints += world.rest()
                before = world.held()
        complaints += world.rest()
        deadline = time.monotonic() + _WAIT_S  # engines close connections some time after the peer
        while any(now.exceeds(before[name]) for name, now in world.held().items()) and time.monotonic() < deadline:
            time.sleep(0.5)
        after = world.held()
        complaints += [
            f"{name}: {before[name]}, later {after[name]}" for name in after if after[name].exceeds(before[name])
        ]
        done = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in world.counts.items())
        print(f"servers replaced on {given.transport}: {done}")
        for name in after:
            print(f"  {name}: first {before[name]}; at the end {after[name]}")
        for complaint in complaints:
            print(f"  WRONG {complaint}")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
