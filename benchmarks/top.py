"""Measures the processor time of `kvctl top` while it reads 64 agents with 1,000 rooms each, once per second.

The agents are real admin servers with generated answers, as threads of another process, so that only the tool is
measured: the share of a core that the kernel reports for its process, in each view. The readings are counted at the
agents, because a tool that reads less often than it should would appear cheap.

With --loss, the agents are the eight ranks of `kvctl bench` with small rooms, which take all cores of a small host, and
the share of rooms per second that they lose to `kvctl top` and `kvctl status -w 0.1` is printed: the median of rounds
with these two running, compared with the rounds between them without.

    python benchmarks/top.py
    python benchmarks/top.py --agents 256 --view rooms
    python benchmarks/top.py --loss --seconds 10
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import pty
import select
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvctl.client.calls import Call
from kvctl.client.fleet import Fleet
from kvctl_agent.contract.commands import COMMANDS
from kvctl_agent.contract.states import STAGES
from kvctl_agent.observer.server import SERVED_HERE
from tests.support.admin_server import AdminServer

VIEWS = ("overview", "rooms", "staging", "layers", "peers", "events")
LOAD = "--prefill-tp 4 --decode-dp 4 --tokens 16 --path staged --concurrency 64 --rooms 1000000 --verify off"
SIZE = (120, 40)
WARM_UP_S = 6.0
TICKS = os.sysconf("SC_CLK_TCK")
MS, S = 1_000_000, 1_000_000_000


class Rank:
    """Generated answers of one agent to admin commands; values change between readings, as in a live agent."""

    def __init__(self, number: int, agents: int, rooms: int) -> None:
        half = max(1, agents // 2)
        self.reads = number >= half
        self.name = f"decode-{number - half}" if self.reads else f"prefill-{number}"
        self.others = [f"prefill-{each}" if self.reads else f"decode-{each}" for each in range(half)]
        self.number, self.half, self.rooms = number, half, rooms
        self.asked = 0

    def hello(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "role": "decode" if self.reads else "prefill",
            "pid": 1000 + self.number,
            "version": "0",
            "protocol": [1, 1],
            "incarnation": f"{self.number:016x}",
            "level": "read",
            "capabilities": ["staged"],
            "uptime_ns": S,
            "now_ns": time.time_ns(),
        }

    def status(self, _: dict[str, Any]) -> dict[str, Any]:
        self.asked += 1
        number = self.number % self.half
        ring = {"size_bytes": 4 << 30, "used_bytes": self.asked * 7 % 40 << 26, "high_water_bytes": 3 << 30, "live": 40}
        return {
            "name": self.name,
            "role": "decode" if self.reads else "prefill",
            "rank": {
                "dp": number if self.reads else 0,
                "pp": 0,
                "cp": 0,
                "tp": 0 if self.reads else number,
                "unique": 0,
            },
            "sizes": {"dp": self.half if self.reads else 1, "pp": 1, "cp": 1, "tp": 1 if self.reads else self.half},
            "pid": 1000 + self.number,
            "incarnation": f"{self.number:016x}",
            "version": "0",
            "uptime_ns": self.asked * S,
            "transport": {"engine": "nixl", "backend": "UCX", "lanes": ["rdma"]},
            "device": "cuda:0",
            "rooms": {"Bootstrapping": 10, "WaitingForInput": 200, "Transferring": self.rooms - 210},
            "rooms_finished_total": {"Success": 1000 * self.asked, "Failed": 0},
            "bytes_total": self.asked << 33,
            "rate": {"window_ns": 10 * S, "bytes": 1 << 36, "gb_per_s": 8.0 + self.asked % 7, "rooms_per_s": 1000.0},
            "latency": {"p50_ns": 12 * MS + self.asked, "p90_ns": 30 * MS, "p99_ns": 41 * MS, "count": 5000},
            "ring": ring if self.reads else None,
            "peers": {"ready": self.half},
            "pipeline": None,
            "pool": {"pages": 4096, "page_size": 16, "bytes": 1 << 36, "layers": 61, "heads": 1},
            "waiting_for": None,
        }

    def room_rows(self, args: dict[str, Any]) -> list[dict[str, Any]]:
        return [self.room_row(place) for place in range(min(self.rooms, args.get("limit", self.rooms)))]

    def room_row(self, place: int) -> dict[str, Any]:
        done = (self.asked * 3 + place) % 64
        return {
            "room": str(7_000_000_000_000 + place),
            "nonce": str(9_000_000_000_000 + place),
            "agent": self.name,
            "role": "decode" if self.reads else "prefill",
            "state": "Transferring" if place % 4 else "WaitingForInput",
            "state_age_ns": (self.rooms - place) * MS + self.asked * MS,
            "age_ns": (self.rooms - place) * 2 * MS + self.asked * MS,
            "opened_at_ns": time.time_ns(),
            "finished_at_ns": None,
            "peers": self.others[:4],
            "coverage": {"planned": 64, "sent": done, "landed": done, "scattered": done},
            "tokens": 4096,
            "pages": 256,
            "bytes": 64 << 20,
            "parts": 16,
            "paths": {"staged": 16},
            "parked": 0,
            "latency_ns": None,
            "forward_done_at_ns": None,
            "hidden_ns": None,
            "exposed_ns": None,
            "failure": None,
            "missing": [],
            "owed": {},
            "unscattered": None,
        }

    def staging(self, _: dict[str, Any]) -> dict[str, Any]:
        base = {
            "agent": self.name,
            "role": "decode" if self.reads else "prefill",
            "enabled": True,
            "fallbacks_total": 0,
        }
        if not self.reads:
            buffers = {"size_bytes": 1 << 30, "piece_bytes": 1 << 20, "pieces": 1024, "pieces_used": 90}
            return {**base, "ring": None, "buffers": {**buffers, "pieces_high_water": 400}, "gated": []}
        allocations = [
            {
                "serial": self.asked * 40 + place,
                "room": str(7_000_000_000_000 + place),
                "nonce": "1",
                "writer": self.others[place % self.half],
                "chunk": 0,
                "layers": [0, 61],
                "offset": place << 26,
                "end": (place + 1) << 26,
                "round": 3,
                "age_ns": 9 * MS,
                "state": "landed" if place % 2 else "granted",
                "aside": False,
            }
            for place in range(40)
        ]
        ring = {
            "size_bytes": 4 << 30,
            "head_bytes": 40 << 26,
            "round": 3,
            "used_bytes": 40 << 26,
            "high_water_bytes": 3 << 30,
            "watermark": {"round": 3, "tail": 0, "age_ns": 4 * MS},
            "allocations": allocations,
            "granted_total": self.asked * 40,
            "refused_total": 0,
            "revoked_total": 0,
        }
        return {**base, "ring": ring, "buffers": None, "gated": []}

    def layers(self, _: dict[str, Any]) -> list[dict[str, Any]]:
        stage = {"p50_ns": 2 * MS + self.asked, "p90_ns": 3 * MS, "p99_ns": 4 * MS, "count": 900}
        return [
            {
                "agent": self.name,
                "layers": [group * 8, group * 8 + 8],
                "path": "staged",
                "parts": 900,
                "bytes": 900 << 20,
                "stages": dict.fromkeys(STAGES, stage),
                "exposed_ns": None if self.reads else MS,
                "overlapped_ns": None if self.reads else 6 * MS,
            }
            for group in range(8)
        ]

    def peers(self, _: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {
                "agent": self.name,
                "peer": other,
                "role": "prefill" if self.reads else "decode",
                "state": "ready",
                "incarnation": f"{place + (0 if self.reads else self.half):016x}",
                "endpoint": "tcp://10.0.0.1:5000",
                "last_heard_ns": 200 * MS,
                "unheard_ns": 900_000_000,
                "address": None,
                "wire_ns": None,
                "oldest_write_ns": None,
                "tcp": None,
                "rtt_ns": 210_000,
                "clock_offset_ns": None,
                "clock_error_ns": None,
                "control_queue": 0,
                "watermark_sent": [3, 0, self.asked] if self.reads else None,
                "watermark_seen": None if self.reads else [3, 0, self.asked],
                "lane": "rdma",
                "rooms": 30,
                "errors_total": 0,
                "last_error": None,
                "differences": [],
            }
            for place, other in enumerate(self.others)
        ]

    def events(self, args: dict[str, Any]) -> dict[str, Any]:
        end = self.asked * 50
        rows = [
            {
                "sequence": place,
                "at_ns": time.time_ns(),
                "agent": self.name,
                "kind": "room",
                "severity": "info",
                "room": str(7_000_000_000_000 + place),
                "peer": None,
                "text": "finished after 12.4 ms, 64 MiB from 4 writers",
            }
            for place in range(max(0, end - args.get("limit", 1000)), end)
        ]
        return {"events": rows, "next": end, "dropped": 0}

    def metrics(self, _: dict[str, Any]) -> list[dict[str, Any]]:
        buckets = [[10.0**power, power * 100] for power in range(-6, 6)]
        sample = {"labels": {"stage": "wire"}, "value": None, "buckets": buckets, "sum": 12.5, "count": 900}
        family = {"kind": "histogram", "unit": "seconds", "help": "Stage times.", "samples": [sample] * 8}
        return [{"name": f"kvctl_{number}_seconds", **family} for number in range(40)]


def serve(agents: int, rooms: int) -> None:
    """Runs the agents until stdin ends; answers every line with the number of `status` requests to the first agent."""
    ranks = [Rank(number, agents, rooms) for number in range(agents)]
    with contextlib.ExitStack() as stack:
        for rank in ranks:
            answers: dict[str, Any] = {command.name: lambda _: [] for command in COMMANDS}
            answers |= {"history": lambda _: [], "slow": lambda _: [], "config": lambda _: [], "rooms": rank.room_rows}
            answers |= {
                each: getattr(rank, each) for each in ("status", "staging", "layers", "peers", "events", "metrics")
            }
            handlers = {name: answer for name, answer in answers.items() if name not in SERVED_HERE}
            server = AdminServer(rank.name, handlers, rank.hello)  # type: ignore[arg-type]
            stack.callback(server.close)
            server.start()
        print("ready", flush=True)
        for _ in sys.stdin:
            print(ranks[0].asked, flush=True)


class Agents:
    """Agents in a child process; `asked` returns how often `status` of the first agent was read."""

    def __init__(self, agents: int, rooms: int, directory: str) -> None:
        command = [sys.executable, __file__, "--serve", "--agents", str(agents), "--rooms", str(rooms)]
        environment = {**os.environ, "KVCTL_SOCKET_DIR": directory}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def asked(self) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return int(self._line())

    def close(self) -> None:
        self._process.communicate(timeout=30)


def cpu_s(pid: int) -> float:
    """Returns the user and system time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@contextlib.contextmanager
def top(view: str, directory: str, size: tuple[int, int] = SIZE) -> Iterator[subprocess.Popen[bytes]]:
    """Runs `kvctl top` in a terminal of `size` columns and lines that nobody looks at."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
    environment = {**os.environ, "KVCTL_SOCKET_DIR": directory, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    command = [sys.executable, "-m", "kvctl", "top", "--view", view]
    process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    done = threading.Event()
    reader = threading.Thread(target=_swallow, args=(leader, done))
    reader.start()
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10)
        done.set()
        reader.join()
        os.close(leader)


def measure(view: str, seconds: float, agents: Agents, directory: str) -> tuple[float, float]:
    """Runs `kvctl top` in one view; returns the share of a core that it takes, and its readings per second."""
    with top(view, directory) as process:
        time.sleep(WARM_UP_S)
        before, asked, started = cpu_s(process.pid), agents.asked(), time.monotonic()
        time.sleep(seconds)
        took = time.monotonic() - started
        return (cpu_s(process.pid) - before) / took, (agents.asked() - asked) / took


def measure_loss(seconds: float, rounds: int, directory: str) -> None:
    """Prints the rooms per second of a busy fleet with and without observers, in turns of `seconds`."""
    os.environ["KVCTL_SOCKET_DIR"] = directory
    kvctl = [sys.executable, "-m", "kvctl"]
    load = subprocess.Popen([*kvctl, "bench", *LOAD.split()], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rates: dict[bool, list[float]] = {False: [], True: []}
    shares: list[tuple[float, float]] = []
    try:
        with Fleet((), {}, 10 * S) as fleet:

            def finished() -> int:
                answers = fleet.survey([Call("status")]).answers("status")
                return sum(data["rooms_finished_total"]["Success"] for _, data in answers if data["role"] == "decode")

            while not finished():
                if load.poll() is not None:
                    raise SystemExit(f"kvctl bench {LOAD} ended with {load.returncode} before its first room")
                time.sleep(1)
            for _ in range(rounds):
                for watched in rates:
                    with contextlib.ExitStack() as observers:
                        processes = []
                        if watched:
                            processes.append(observers.enter_context(top("overview", directory)))
                            status = subprocess.Popen([*kvctl, "status", "-w", "0.1"], stdout=subprocess.DEVNULL)
                            observers.callback(status.wait)
                            observers.callback(status.terminate)
                            processes.append(status)
                        time.sleep(WARM_UP_S)
                        rooms, cpu, started = finished(), [cpu_s(each.pid) for each in processes], time.monotonic()
                        time.sleep(seconds)
                        took = time.monotonic() - started
                        rates[watched].append((finished() - rooms) / took)
                        if watched:
                            used = [
                                (cpu_s(each.pid) - before) / took for each, before in zip(processes, cpu, strict=True)
                            ]
                            shares.append((used[0], used[1]))
    finally:
        load.terminate()
        load.wait(60)
    alone, observed = statistics.median(rates[False]), statistics.median(rates[True])
    spread = ", ".join(f"{without:.0f} and {with_them:.0f}" for without, with_them in zip(*rates.values(), strict=True))
    of_top, of_status = (statistics.median(values) for values in zip(*shares, strict=True))
    print(f"{alone:.0f} rooms/s alone, {observed:.0f} observed: {1 - observed / alone:.1%} lost (rounds: {spread})")
    print(f"kvctl top {of_top:.1%} of a core, kvctl status -w 0.1 {of_status:.1%}")


def _swallow(leader: int, done: threading.Event) -> None:
    """Discards everything that is written to the terminal."""
    while not done.is_set():
        if select.select([leader], [], [], 0.1)[0]:
            try:
                os.read(leader, 1 << 16)
            except OSError:
                return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--rooms", type=int, default=1000, help="active rooms of each agent")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each view")
    parser.add_argument("--view", choices=VIEWS, help="only this one")
    parser.add_argument("--loss", action="store_true", help="measure what a busy fleet loses to observers")
    parser.add_argument("--rounds", type=int, default=3, help="with --loss")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.agents, options.rooms)
        return
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as directory:
        Path(directory).chmod(0o700)
        if options.loss:
            measure_loss(options.seconds, options.rounds, directory)
            return
        agents = Agents(options.agents, options.rooms, directory)
        try:
            print(
                f"{options.agents} agents with {options.rooms} rooms each, {SIZE[0]}x{SIZE[1]}; "
                f"load of this machine {os.getloadavg()[0]:.1f}"
            )
            for view in [options.view] if options.view else VIEWS:
                share, pace = measure(view, options.seconds, agents, directory)
                print(f"{view:<10}{share:7.1%} of a core  {pace:5.2f} readings/s", flush=True)
        finally:
            agents.close()


if __name__ == "__main__":
    main()
