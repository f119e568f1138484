"""Measures kvctl on a synthetic fleet of many agents on many hosts, and prints a table in Markdown.

The agents are admin sockets of a few processes on this machine. Their answers are those of a real fleet (`kvctl demo`,
or a recording of any fleet) with other names, hosts, ranks, peers and rooms, and with counters that grow. Hosts have
one instance each, of prefill and decode ranks in turn, and instances are connected in groups, so that each agent has
--peers peers. Prefill rank 3 of host 12 is called h012-prefill-3.

With --serve, the fleet runs until Ctrl-C, and the environment variables for other terminals are printed.

    python benchmarks/large_fleet.py
    python benchmarks/large_fleet.py --transport tcp --silent 3 --odd 2
    python benchmarks/large_fleet.py --serve --agents 200 --hosts 25
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import os
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.top import cpu_s, top
from kvctl.client.calls import Call
from kvctl.client.fleet import Fleet, Source
from kvctl.client.recordings import RecordingSource
from kvctl_agent.contract.admin import MAGIC, lock_path, socket_path
from kvctl_agent.contract.health import HEALTH_ROOMS
from kvctl_agent.host.keys import PUBLIC_SUFFIX
from kvctl_agent.observer.health import health

COMMANDS = (
    *(["status"], ["status", "-o", "json"], ["health"], ["doctor"], ["check", "all"]),
    *(["agents"], ["rooms"], ["peers"], ["status", "-l", "role=decode,tp=0"]),
)
VIEWS = ("overview", "rooms")
SIZE = (200, 60)
WARM_UP_S = 10.0
LOAD = "--transport loopback --rate 40"
SAMPLED = ("status", "rooms", "history", "failed", "slow", "staging", "layers", "peers", "events", "metrics", "config")
ROLES = ("prefill", "decode")
MS, S = 1_000_000, 1_000_000_000

Samples = Mapping[str, Mapping[str, Any]]
"""Answers of one real agent of each role, by role and command."""


class Shape(NamedTuple):
    """Size of the fleet: its agents, their hosts, the peers of each agent and the active rooms of each prefill rank."""

    agents: int
    hosts: int
    peers: int
    rooms: int

    @property
    def per_host(self) -> int:
        return -(-self.agents // self.hosts)

    def role(self, number: int) -> str:
        return ROLES[number // self.per_host % 2]

    def name(self, number: int) -> str:
        host, rank = divmod(number, self.per_host)
        return f"h{host:03}-{self.role(number)}-{rank}"

    def group(self, number: int, role: str) -> list[int]:
        """Returns the agents of one role in the group of an agent."""
        size = max(1, self.peers // self.per_host) * 2 * self.per_host
        begin = number // size * size
        return [each for each in range(begin, min(begin + size, self.agents)) if self.role(each) == role]


class Faults(NamedTuple):
    """Numbers of the agents that do not answer, and of those with a lost peer and a room that does not end."""

    silent: frozenset[int]
    odd: frozenset[int]


@dataclass
class SyntheticAgent:
    """Answers of one agent, which change with time."""

    number: int
    shape: Shape
    faults: Faults
    samples: Samples
    started: float

    @cached_property
    def name(self) -> str:
        return self.shape.name(self.number)

    @cached_property
    def role(self) -> str:
        return self.shape.role(self.number)

    @cached_property
    def host(self) -> str:
        return f"host-{self.number // self.shape.per_host:03}"

    @cached_property
    def peer_numbers(self) -> list[int]:
        return self.shape.group(self.number, ROLES[self.role == ROLES[0]])

    @cached_property
    def renamed(self) -> list[tuple[bytes, bytes]]:
        """Names in the samples, each with the name that it becomes."""
        names = {self.samples[self.role]["status"]["name"]: self.name}
        for row, peer in zip(self.samples[self.role]["peers"], self.peer_numbers, strict=False):
            names[row["peer"]] = self.shape.name(peer)
        return [(b'"%s"' % old.encode(), b'"%s"' % new.encode()) for old, new in names.items()]

    @property
    def incarnation(self) -> str:
        return _incarnation(self.number)

    @property
    def odd(self) -> bool:
        return self.number in self.faults.odd

    def prepare(self) -> None:
        """Computes what does not change, which takes milliseconds, before the first request."""
        self.answer("health", {})

    def answer(self, command: str, args: Mapping[str, Any]) -> bytes:
        """Returns the data of a reply as JSON."""
        make = getattr(self, f"_{command}", None)
        data = self.samples[self.role].get(command, []) if make is None else make(args)
        text = orjson.dumps(data)
        for old, new in self.renamed:
            text = text.replace(old, new)
        return text

    def _hello(self, _: Mapping[str, Any]) -> Any:
        own = {"name": self.name, "host": self.host, "incarnation": self.incarnation, "now_ns": time.time_ns()}
        return {**self.samples[self.role]["hello"], **own, "pid": 1000 + self.number}

    def _status(self, _: Mapping[str, Any]) -> Any:
        sample = self.samples[self.role]["status"]
        seconds = time.monotonic() - self.started
        swing = 1 + 0.2 * math.sin(seconds / 5 + self.number)
        rank = self.number % self.shape.per_host
        axis = "tp" if self.role == "prefill" else "dp"
        finished = round(seconds * 20) + 1000
        peers = len(self.peer_numbers)
        return {
            **sample,
            **{"name": self.name, "host": self.host, "incarnation": self.incarnation, "pid": 1000 + self.number},
            "rank": {"dp": 0, "pp": 0, "cp": 0, "tp": 0, "unique": rank, axis: rank},
            "sizes": {"dp": 1, "pp": 1, "cp": 1, "tp": 1, axis: self.shape.per_host},
            "uptime_ns": round((seconds + 3600) * S),
            "rooms": {"Bootstrapping": 0, "WaitingForInput": 0, "Transferring": len(self.rooms)},
            "rooms_finished_total": {"Success": finished, "Failed": 0},
            "bytes_total": finished << 26,
            "rate": {**sample["rate"], "gb_per_s": 8 * swing, "rooms_per_s": 20.0},
            "latency": {"p50_ns": round(12 * MS * swing), "p90_ns": 30 * MS, "p99_ns": 41 * MS, "count": 1024},
            "peers": {"ready": peers - self.odd, **({"lost": 1} if self.odd else {})},
        }

    @cached_property
    def rooms(self) -> list[tuple[str, list[str]]]:
        """The active rooms, as number and names of the peers: room k of a prefill instance h has one decode rank."""
        shape, found = self.shape, []
        writers = self.shape.group(self.number, "prefill")
        readers = self.shape.group(self.number, "decode")
        for instance in range(0, len(writers), shape.per_host):
            ranks = writers[instance : instance + shape.per_host]
            for k in range(shape.rooms if readers else 0):
                reader = readers[(instance * shape.rooms // shape.per_host + k) % len(readers)]
                if self.number in ranks:
                    found.append((str(ranks[0] << 32 | k), [shape.name(reader)]))
                elif self.number == reader:
                    found.append((str(ranks[0] << 32 | k), [shape.name(each) for each in ranks]))
        return found

    def _rooms(self, args: Mapping[str, Any]) -> Any:
        row = self.samples[self.role]["rooms"][0]
        turn = int((time.monotonic() - self.started) * 20)
        rows = []
        for place, (room, peers) in enumerate(self.rooms):
            stuck = self.odd and place == 0
            age = 900 * S if stuck else (turn * 7 + place * 13) % 400 * MS
            number = room if stuck else str(int(room) + (turn << 16))
            own = {"room": number, "nonce": number, "agent": self.name, "peers": peers, "missing": [], "owed": {}}
            rows.append({**row, **own, "age_ns": age, "state_age_ns": age, "opened_at_ns": time.time_ns() - age})
        rows.sort(key=lambda each: -each["age_ns"])
        return rows[: args.get("limit") or 1000]

    def _history(self, args: Mapping[str, Any]) -> Any:
        rows = self.samples[self.role]["history"][: args.get("limit") or 1000]
        return [{**row, "room": str(self.number << 48 | place)} for place, row in enumerate(rows)]

    _slow = _history

    def _peers(self, _: Mapping[str, Any]) -> Any:
        return self.peer_rows

    def _health(self, _: Mapping[str, Any]) -> Any:
        sample = self.samples[self.role]
        return health(
            self._status({}),
            self._rooms({"limit": HEALTH_ROOMS}),
            sample["failed"],
            sample["staging"],
            self.peer_rows,
            sample["metrics"],
            sample["config"],
            time.time_ns(),
        )

    @cached_property
    def peer_rows(self) -> Any:
        row = {**self.samples[self.role]["peers"][0], "agent": self.name}
        found = [
            {
                **row,
                "peer": self.shape.name(peer),
                "peer_host": f"host-{peer // self.shape.per_host:03}",
                "incarnation": _incarnation(peer),
                "same_host": False,
                "process": f"process {1000 + peer} on host-{peer // self.shape.per_host:03}",
            }
            for peer in self.peer_numbers
        ]
        if self.odd and found:
            found[0] |= {"state": "lost", "last_heard_ns": 600 * S, "last_error": "no heartbeat for 600 s"}
        return found


def _incarnation(number: int) -> str:
    return f"{0x18C0FFEE00000000 + number:016x}"


def sample(recording: Path | None, directory: str) -> Samples:
    """Returns the answers of one agent of each role, from a recording or from `kvctl demo`, which runs meanwhile."""
    if recording is not None and recording.suffix == ".json":
        samples: Samples = orjson.loads(recording.read_bytes())
        return samples
    if recording is not None:
        return _sample(RecordingSource(recording, (), {}))
    os.environ["KVCTL_SOCKET_DIR"] = directory
    demo = subprocess.Popen(
        [sys.executable, "-m", "kvctl", "demo", *LOAD.split()], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            samples = _sample(Fleet((), {}, 5 * S))
            complete = [role for role in ROLES if role in samples and len(samples[role]["history"]) >= 50]
            if len(complete) == len(ROLES) and all(samples[role]["rooms"] for role in ROLES):
                return samples
            time.sleep(0.2)
        raise SystemExit("kvctl demo finished no 50 rooms in 60 s")
    finally:
        demo.send_signal(signal.SIGINT)
        demo.wait(60)


def _sample(source: Source) -> Samples:
    with source:
        survey = source.survey([Call(command) for command in SAMPLED])
    return {agent.hello["role"]: {"hello": agent.hello, **agent.data} for agent in survey.agents}


def serve(agents: Sequence[SyntheticAgent], secret: bytes | None, directory: Path, parent: Connection) -> None:
    """Serves agents until the parent process closes the connection, after sending it the agents' addresses.

    Args:
        secret: secret CURVE key of the fleet, for endpoints on TCP; None for Unix sockets in `directory`.
        parent: a line, answered with the number of requests for `status` so far, or the end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.max_sockets = 2 * len(agents) + 8
    epoll = select.epoll()
    epoll.register(parent.fileno(), select.EPOLLIN)
    served: dict[int, tuple[zmq.Socket[bytes], SyntheticAgent]] = {}
    addresses = []
    for agent in agents:
        agent.prepare()
        socket = context.socket(zmq.ROUTER)
        socket.linger = 0
        if secret is None:
            path = socket_path(agent.name, directory)
            lock_path(path).write_text(f"{os.getpid()}\n")
            socket.bind(f"ipc://{path}")
        else:
            socket.curve_server, socket.curve_secretkey = True, secret
            socket.bind("tcp://127.0.0.1:*")
        addresses.append(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        descriptor = int(socket.getsockopt(zmq.FD))
        served[descriptor] = socket, agent
        epoll.register(descriptor, select.EPOLLIN)
    parent.send(addresses)
    asked = 0
    while True:
        for descriptor, _ in epoll.poll():
            if descriptor == parent.fileno():
                try:
                    parent.recv()
                except EOFError:
                    context.destroy(linger=0)
                    return
                parent.send(asked)
                continue
            socket, agent = served[descriptor]
            # The descriptor becomes unreadable only when the socket's events are read.
            while int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                asked += _answer(socket, agent)


def _answer(socket: zmq.Socket[bytes], agent: SyntheticAgent) -> bool:
    """Answers one request; returns whether it was for `status`."""
    client, _, request_id, body = socket.recv_multipart()
    request = orjson.loads(body)
    if agent.number not in agent.faults.silent:
        data = agent.answer(request["cmd"], request.get("args") or {})
        now = time.time_ns()
        reply = b'{"ok":true,"generated_at_ns":%d,"sequence":%d,"data":%s}' % (now, now, data)
        socket.send_multipart([client, MAGIC, request_id, reply])
    return bool(request["cmd"] == "status")


class SyntheticFleet:
    """A synthetic fleet in child processes; a context manager.

    Attributes:
        environment: variables under which `kvctl` finds the fleet.
    """

    def __init__(
        self, shape: Shape, faults: Faults, samples: Samples, base: Path, transport: str, processes: int
    ) -> None:
        directory = base / "s"
        directory.mkdir(mode=0o700)
        self.environment = {"KVCTL_SOCKET_DIR": str(directory), "XDG_CONFIG_HOME": str(base / "config")}
        self._children: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        public, secret = zmq.curve_keypair() if transport == "tcp" else (b"", None)
        started = time.monotonic()
        agents = [SyntheticAgent(number, shape, faults, samples, started) for number in range(shape.agents)]
        fork = multiprocessing.get_context("fork")
        addresses: list[str] = []
        for part in range(processes):
            ours, theirs = fork.Pipe()
            own = agents[part::processes]
            inherited = [each for _, each in self._children] + [ours]
            child = fork.Process(target=_run_child, args=(inherited, own, secret, directory, theirs))
            child.start()
            theirs.close()
            self._children.append((child, ours))
        for _, connection in self._children:
            if not connection.poll(60):
                raise SystemExit("the agents did not start in 60 s")
            addresses += connection.recv()
        if secret is not None:
            self._write_context(addresses, zmq.utils.z85.decode(public), base)

    def _write_context(self, addresses: Sequence[str], key: bytes, base: Path) -> None:
        """Writes a client key, the fleet's public key, and the context `large` with all addresses."""
        environment = {**os.environ, **self.environment}
        server = base / f"fleet{PUBLIC_SUFFIX}"
        server.write_text(f"{key.hex()} fleet\n")
        endpoints = [part for address in addresses for part in ("-e", address)]
        add = [*endpoints, "--server-key", str(server), "context", "add", "large"]
        for command in (["key", "new"], add):
            subprocess.run([sys.executable, "-m", "kvctl", *command], env=environment, check=True, stdout=sys.stderr)
        self.environment["KVCTL_CONTEXT"] = "large"

    def asked(self) -> int:
        """Returns the number of requests for `status` that all agents have received."""
        for _, connection in self._children:
            connection.send(None)
        return sum(connection.recv() for _, connection in self._children)

    def __enter__(self) -> SyntheticFleet:
        return self

    def __exit__(self, *_: object) -> None:
        for child, connection in self._children:
            connection.close()
            child.join(30)


def _run_child(inherited: Sequence[Connection], *args: Any) -> None:
    for each in inherited:  # otherwise the siblings would not see their ends close
        each.close()
    serve(*args)


class Usage(NamedTuple):
    """Cost of one command: wall-clock and processor time, and peak memory; `code` is its exit status."""

    wall_s: float
    cpu_s: float
    rss_bytes: int
    code: int


def run(command: Sequence[str]) -> Usage:
    """Runs `kvctl` with its output in a pipe that is read."""
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvctl", *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    while process.stdout.read(1 << 20):
        pass
    _, status, usage = os.wait4(process.pid, 0)
    process.stdout.close()
    process.returncode = os.waitstatus_to_exitcode(status)
    return Usage(time.monotonic() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss << 10, process.returncode)


def watch(view: str, seconds: float, fleet: SyntheticFleet, agents: int) -> tuple[float, float, int]:
    """Runs `kvctl top`; returns its share of a core, the readings of an agent per second, and its peak memory."""
    with top(view, fleet.environment["KVCTL_SOCKET_DIR"], SIZE) as process:
        time.sleep(WARM_UP_S)
        before, asked, started = cpu_s(process.pid), fleet.asked(), time.monotonic()
        time.sleep(seconds)
        took = time.monotonic() - started
        share, pace = (cpu_s(process.pid) - before) / took, (fleet.asked() - asked) / took / agents
        high = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
        return share, pace, int(high[1]) << 10 if high else 0


def report(fleet: SyntheticFleet, shape: Shape, commands: Sequence[Sequence[str]], seconds: float) -> None:
    """Measures the commands and the views, and prints the table."""
    print("| command | wall | CPU | memory | exit |\n| --- | --: | --: | --: | --: |", flush=True)
    for command in commands:
        used = min((run(command) for _ in range(3)), key=lambda each: each.wall_s)
        cells = f"{used.wall_s:.2f} s | {used.cpu_s:.2f} s | {used.rss_bytes >> 20} MiB | {used.code}"
        print(f"| `kvctl {' '.join(command)}` | {cells} |", flush=True)
    for view in VIEWS if seconds else ():
        share, pace, peak = watch(view, seconds, fleet, shape.agents)
        cells = f"{pace:.2f} readings/s | {share:.1%} of a core | {peak >> 20} MiB | "
        print(f"| `kvctl top --view {view}` | {cells} |", flush=True)


def chosen_faults(shape: Shape, silent: int, silent_hosts: int, odd: int) -> Faults:
    """Spreads faults over the fleet: silent hosts first, then silent agents, then odd ones, on other hosts."""
    hosts = [shape.hosts * (2 * each + 1) // (2 * silent_hosts) for each in range(silent_hosts)]
    quiet = {number for number in range(shape.agents) if number // shape.per_host in hosts}
    rest = [number for number in range(shape.agents) if number not in quiet]
    picked = rest[shape.per_host // 2 :: max(1, len(rest) // max(1, silent + odd))][: silent + odd]
    return Faults(frozenset(quiet | set(picked[:silent])), frozenset(picked[silent:]))


@contextlib.contextmanager
def synthetic_fleet(options: argparse.Namespace) -> Iterator[tuple[SyntheticFleet, Shape]]:
    shape = Shape(options.agents, options.hosts, options.peers, options.rooms)
    faults = chosen_faults(shape, options.silent, options.silent_hosts, options.odd)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as base:
        demo = Path(base) / "demo"
        demo.mkdir(mode=0o700)
        samples = sample(options.recording, str(demo))
        with SyntheticFleet(shape, faults, samples, Path(base), options.transport, options.processes) as fleet:
            yield fleet, shape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=1024)
    parser.add_argument("--hosts", type=int, default=128)
    parser.add_argument("--peers", type=int, default=64, help="of each agent")
    parser.add_argument("--rooms", type=int, default=40, help="active rooms of each prefill rank")
    parser.add_argument("--transport", choices=("ipc", "tcp"), default="ipc", help="tcp: with keys")
    parser.add_argument("--silent", type=int, default=0, help="agents that do not answer")
    parser.add_argument("--silent-hosts", type=int, default=0, help="hosts whose agents do not answer")
    parser.add_argument("--odd", type=int, default=0, help="agents with a lost peer and a room that does not end")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--recording", type=Path, help="recording or .json to copy answers from [kvctl demo]")
    parser.add_argument("--command", action="append", help="measure only this command of kvctl; repeatable")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each view of kvctl top; 0: no views")
    parser.add_argument("--serve", action="store_true", help="run the fleet until Ctrl-C and measure nothing")
    options = parser.parse_args()
    with synthetic_fleet(options) as (fleet, shape):
        if options.serve:
            print(" ".join(f"{name}={value}" for name, value in fleet.environment.items()), flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                signal.signal(signal.SIGTERM, signal.default_int_handler)
                signal.pause()
            return
        os.environ.update(fleet.environment)
        wanted = f"{shape.agents} agents on {shape.hosts} hosts, {shape.peers} peers each, {options.transport}"
        print(f"{wanted}; load of this machine {os.getloadavg()[0]:.1f}\n", flush=True)
        report(fleet, shape, [each.split() for each in options.command or ()] or COMMANDS, options.seconds)


if __name__ == "__main__":
    main()
