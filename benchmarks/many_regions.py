"""Measures one observer process that serves many agents of one host, and `kvctl` beside it; prints a Markdown table.

The agents are regions of one process, which writes what a pair of real agents (`sample`) has in theirs, with other
names and --peers peers each, publishes documents once a second and when the observer asks for them, and opens and ends
--rate rooms a second in turn. So neither engines nor control loops take part, and the observer does what it does for
real agents.

    python benchmarks/many_regions.py
    python benchmarks/many_regions.py --agents 200 --command status --seconds 0
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import multiprocessing
import os
import re
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.large_fleet import run
from benchmarks.top import cpu_s, top
from kvctl_agent import Agent, KVPool, ModelShape, Rank, RoomState, local_shards
from kvctl_agent.contract.admin import OBSERVER_SOCKET, lock_path, region_directory, socket_path
from kvctl_agent.contract.settings import load_settings
from kvctl_agent.contract.snapshots import Role
from kvctl_agent.observer.link import SETTINGS
from kvctl_agent.observer.link_messages import MessageSocket, Register, Registered, from_observer
from kvctl_agent.observer.socket_claim import prepare_directory
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.telemetry.region import (
    LEAST_LOG_BYTES,
    SUFFIX,
    Cell,
    Document,
    Header,
    RegionReader,
    RegionWriter,
    namespace,
)

COMMANDS = (["status"], ["status", "-o", "json"], ["health"], ["doctor"], ["rooms"], ["peers"])
VIEWS = ("overview", "rooms", "staging", "layers", "peers", "events")
SIZE = (200, 60)
WARM_UP_S = 10.0
READY_S = 120.0
TURN_S = 0.1
PUBLISHED_EVERY = 10  # turns
PARTS = 4
STAGES = ("queue", "ready", "post", "wire")


class Sample(NamedTuple):
    """What a real agent of one role has in its region: its documents, and the names of its counters."""

    documents: dict[Document, bytes]
    peer: str


def sample(directory: Path) -> dict[str, Sample]:
    """Runs a pair of agents, transfers a few rooms, and returns their documents by role."""
    shape, rank = ModelShape(4, 8, 8, 8, 2), Rank()
    os.environ["KVCTL_SOCKET_DIR"] = str(directory)
    found: dict[str, Sample] = {}
    with contextlib.ExitStack() as stack:
        agents: dict[str, Agent] = {}
        for role in ("prefill", "decode"):
            shards = local_shards(shape, 16, rank.parallel_config, rank.coord)
            options: dict[str, Any] = {"staging_buffer_mb": 4, "staging_ring_mb": 4, "transport": "loopback"}
            options |= {"bootstrap": f"ipc://{directory}/registry", "model": shape, "name": f"{role}-0"}
            pool = KVPool.allocate(shards, 16, 64)
            agents[role] = stack.enter_context(Agent(role=role, rank=rank, pool=pool, **options).start())
        agents["decode"].wait_ready(30)
        for room in range(1, 20):
            receive, send = agents["decode"].receive(room, np.arange(16)), agents["prefill"].send(room)
            send.prefetch()
            send.pages(np.arange(16), last=True)
            send.finish()
            assert {handle.wait(30) for handle in (receive, send)} == {RoomState.SUCCESS}, receive.error
        time.sleep(3)  # every document is published once a second
        for path in region_directory(directory).glob(f"*{SUFFIX}"):
            reader = RegionReader(path)
            published = {document: reader.document(document) for document in Document}
            documents = {document: each.value for document, each in published.items() if each is not None}
            role = reader.header.role
            found[role] = Sample(documents, "decode-0" if role == "prefill" else "prefill-0")
            reader.close()
    return found


class RegionAgent:
    """A region that is written as an agent's."""

    def __init__(self, number: int, peers: int, samples: dict[str, Sample], directory: Path) -> None:
        role: Role = "decode" if number % 2 else "prefill"
        self.name = f"{role}-{number // 2}"
        first = number // (2 * peers) * peers
        others = [f"{'prefill' if role == 'decode' else 'decode'}-{each}" for each in range(first, first + peers)]
        header = Header.of_this_process(
            role,
            self.name,
            str(directory),
            incarnation=number + 1,
            clock_offset_ns=time.time_ns() - time.monotonic_ns(),
            log_bytes=LEAST_LOG_BYTES,
        )
        self.region = RegionWriter(header, region_directory(directory) / f"{self.name}.{os.getpid()}{SUFFIX}")
        # Observers and kvctl find a running agent by its lock.
        self._lock = os.open(lock_path(socket_path(self.name, directory)), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.write(self._lock, f"{os.getpid()}\n".encode())
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.telemetry = Telemetry(self.name, role, self.region)
        self.documents = dict(samples[role].documents)
        if Document.PEERS in self.documents:
            fields = msgspec.msgpack.decode(self.documents[Document.PEERS])
            at = fields["keys"].index("peer")
            row = fields["rows"][0]
            fields["rows"] = [[*row[:at], other, *row[at + 1 :]] for other in others if other]
            self.documents[Document.PEERS] = msgspec.msgpack.encode(fields)
        # As agents publish these: at the start, and when they change.
        self._once = {each: self.documents.pop(each) for each in (Document.IDENTITY, Document.CONFIG)}
        self.documents.pop(Document.COUNTERS, None)  # `Telemetry` publishes its own
        self._peer = others[0]
        self._open: list[Any] = []
        self._rooms = 0

    def publish(self) -> None:
        """Publishes its documents, as agents do: those that seldom change only once."""
        cells, now = self.region.cells, time.monotonic_ns()
        wanted = cells[Cell.WANTED]
        for document, value in (*self._once.items(), *self.documents.items()):
            self.region.publish(document, value, now)
        self._once.clear()
        cells[Cell.SERVED] = wanted

    def room(self, stays_open: int) -> None:
        """Opens a room and transfers its parts; ends the oldest if more than `stays_open` are open."""
        now, telemetry = time.monotonic_ns(), self.telemetry
        self._rooms += 1
        record = telemetry.open(self._rooms, self._rooms)
        record.tokens, record.pages, record.planned = 4096, 256, PARTS
        record.peers.append(self._peer)
        record.state(RoomState.TRANSFERRING, now)
        for part in range(PARTS):
            moments = {stage: now + 1000 * place for place, stage in enumerate(STAGES)}
            telemetry.part(record, (0, 0, (part, part + 1)), self._peer, "staged", 1 << 20, moments, now)
        self._open.append(record)
        if len(self._open) > stays_open:
            ended = self._open.pop(0)
            ended.state(RoomState.SUCCESS, now)
            telemetry.finish(ended, now)
        telemetry.flush()


def serve(options: argparse.Namespace, sampled: Path, directory: Path, parent: Connection) -> None:
    """Writes the regions until the parent process closes the connection, and answers each of its lines."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    samples = sample(sampled)
    os.environ["KVCTL_SOCKET_DIR"] = str(directory)
    prepare_directory(region_directory(directory))
    agents = [RegionAgent(each, options.peers, samples, directory) for each in range(options.agents)]
    epoll = select.epoll()
    epoll.register(parent.fileno(), select.EPOLLIN)
    by_wake: dict[int, RegionAgent] = {}
    connections = []
    for agent in agents:
        agent.publish()
        for _ in range(options.rooms):
            agent.room(options.rooms)
    loaded = load_settings({})
    settings = {key: loaded[key] for key in SETTINGS}
    subprocess.run([sys.executable, "-m", "kvctl_agent.observer", str(directory)], check=True)
    for agent in agents:
        wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(directory / OBSERVER_SOCKET))
        messages = MessageSocket(connection)
        messages.send(Register(str(agent.region.path), settings, None, [], namespace("net")), wake)
        connection.setblocking(True)
        connection.recv(1, socket.MSG_PEEK)
        connection.setblocking(False)
        replies, _ = messages.receive()
        if not isinstance(reply := from_observer.decode(replies[0]), Registered):
            raise SystemExit(f"the observer does not serve {agent.name}: {reply}")
        connections.append(messages)
        by_wake[wake] = agent
        epoll.register(wake, select.EPOLLIN)
    parent.send(None)
    asked, due, at, turn, turns = 0, time.monotonic(), 0, 0.0, 0
    while True:
        for descriptor, _ in epoll.poll(0.01):
            if descriptor == parent.fileno():
                try:
                    parent.recv()
                except EOFError:
                    for agent in agents:
                        agent.region.close()
                    return
                parent.send(asked)
                continue
            os.eventfd_read(descriptor)
            by_wake[descriptor].publish()
            asked += 1
        if time.monotonic() - turn > TURN_S:
            turn = time.monotonic()
            for agent in agents:
                agent.region.cells[Cell.TURN_NS] = time.monotonic_ns()
            for agent in agents[turns % PUBLISHED_EVERY :: PUBLISHED_EVERY]:  # as agents do, each once a second
                agent.publish()
            turns += 1
        while options.rate and time.monotonic() > due:
            agents[at % len(agents)].room(options.rooms)
            at, due = at + 1, due + 1 / options.rate


def observer_pid(directory: Path) -> int:
    """Returns the process id of the observer."""
    return int((directory / f"{OBSERVER_SOCKET}.lock").read_text())


@contextlib.contextmanager
def fleet(options: argparse.Namespace) -> Iterator[tuple[Path, Connection]]:
    """Runs the agents and yields their socket directory and the connection to their process."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as base:
        sampled, directory = Path(base) / "sample", Path(base) / "s"
        for each in (sampled, directory):
            each.mkdir(mode=0o700)
        os.environ["KVCTL_SOCKET_DIR"] = str(directory)
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        child = spawn.Process(target=serve, args=(options, sampled, directory, theirs))
        child.start()
        theirs.close()
        if not ours.poll(READY_S):
            raise SystemExit("the agents were not there in time")
        ours.recv()
        try:
            yield directory, ours
        finally:
            os.kill(observer_pid(directory), signal.SIGTERM)
            ours.close()
            child.join(30)
            for each in (sampled, directory):
                shutil.rmtree(region_directory(each), ignore_errors=True)


def report(options: argparse.Namespace, directory: Path, connection: Connection) -> None:
    """Measures the commands and the views, and prints the table."""
    pid = observer_pid(directory)

    def asked() -> int:
        connection.send(None)
        return int(connection.recv())

    print("| command | wall | CPU | observer's CPU | exit |\n| --- | --: | --: | --: | --: |", flush=True)
    for command in [each.split() for each in options.command or ()] or COMMANDS:
        before = cpu_s(pid)
        used = min((run(command) for _ in range(3)), key=lambda each: each.wall_s)
        theirs = (cpu_s(pid) - before) / 3
        cells = f"{used.wall_s:.2f} s | {used.cpu_s:.2f} s | {theirs:.2f} s | {used.code}"
        print(f"| `kvctl {' '.join(command)}` | {cells} |", flush=True)
    for view in ("", *VIEWS) if options.seconds else ():
        with contextlib.ExitStack() as stack:
            process = stack.enter_context(top(view, str(directory), SIZE)) if view else None
            time.sleep(WARM_UP_S)
            before, mine, reads = cpu_s(pid), cpu_s(process.pid) if process else 0.0, asked()
            started = time.monotonic()
            time.sleep(options.seconds)
            took = time.monotonic() - started
            pace = (asked() - reads) / took / options.agents
            share = (cpu_s(process.pid) - mine) / took if process else 0.0
            name = f"`kvctl top --view {view}`" if view else "nobody looks"
            theirs = (cpu_s(pid) - before) / took
            print(f"| {name} | {pace:.2f} readings/s | {share:.1%} of a core | {theirs:.1%} of a core | |", flush=True)
    memory = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    print(f"\nthe observer's memory: {int(memory[1]) >> 10 if memory else 0} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--peers", type=int, default=16, help="of each agent")
    parser.add_argument("--rooms", type=int, default=1, help="active rooms of each agent")
    parser.add_argument("--rate", type=float, default=250.0, help="rooms per second of all agents together")
    parser.add_argument("--command", action="append", help="measure only this command of kvctl; repeatable")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each view of kvctl top; 0: no views")
    options = parser.parse_args()
    with fleet(options) as (directory, connection):
        print(f"{options.agents} agents, {options.peers} peers each; load of this machine {os.getloadavg()[0]:.1f}\n")
        report(options, directory, connection)


if __name__ == "__main__":
    main()
