"""Measures what observers get from agents beside a spinning engine, and what they cost it.

A process has a prefill and a decode agent and a thread that never sleeps, as an engine's: an idle scheduler, each of
whose turns is a few microseconds of Python and one `recv(NOBLOCK)`, or a busy one, which runs only Python. Other
threads wait longer for a thread that releases the interpreter often and briefly, above all on many cores.

Prints how many of the calls of `kvctl status`, one after another, got an answer of every agent, and how long they took;
and how many of its turns the engine loses to observers at --rate Hz, in short windows in turns with and without them;
besides, which share of a core its thread had in them, which does not depend on how fast the core was, only on who else
wanted the core or the interpreter. With other load on the machine, run it with `chrt -r 1`.

    python benchmarks/observers.py
    python benchmarks/observers.py --engine busy --looks 20 --rounds 40
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import mmap
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvctl.lab.bench.statistics import percentile

KVCTL = (sys.executable, "-m", "kvctl")
LOOK_S = 30.0


class Look(NamedTuple):
    """One call of `kvctl status`.

    Attributes:
        code: its exit status.
        rows: of the agents that answered.
        age_s: the oldest age of what an agent has published.
        turn_age_s: the longest time since the latest turn of an agent's control loop.
        trouble: what it printed on stderr.
    """

    seconds: float
    code: int
    rows: Sequence[dict[str, Any]]
    age_s: float
    turn_age_s: float
    trouble: str


def look(environment: Mapping[str, str]) -> Look:
    """Runs `kvctl status -o json`."""
    started = time.perf_counter()
    done = subprocess.run(
        [*KVCTL, "status", "-o", "json"],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONDONTWRITEBYTECODE": ""},
        timeout=LOOK_S,
        check=False,
    )
    took = time.perf_counter() - started
    rows: Sequence[dict[str, Any]] = json.loads(done.stdout)["data"] if done.stdout else []
    whole = [row for row in rows if row.get("uptime_ns") is not None]
    age_s, turn_age_s = (
        max((row.get(column) or 0 for row in whole), default=0) / 1e9 for column in ("published_age_ns", "turn_age_ns")
    )
    return Look(took, done.returncode, whole, age_s, turn_age_s, done.stderr.strip())


class LookFigures(NamedTuple):
    """Calls of `kvctl status`: how many, how many of them got answers of all agents, and their times in seconds."""

    looks: int
    complete: int
    p50_s: float
    p99_s: float
    longest_s: float
    oldest_s: float
    oldest_turn_s: float
    trouble: str

    @classmethod
    def of(cls, looks: Sequence[Look], agents: int) -> Self:
        """Raises ValueError: there are no looks."""
        seconds = sorted(each.seconds for each in looks)
        complete = [each for each in looks if each.code == 0 and len(each.rows) == agents]
        trouble = next((each.trouble for each in looks if each not in complete), "")
        return cls(
            len(looks),
            len(complete),
            percentile(seconds, 0.5),
            percentile(seconds, 0.99),
            seconds[-1],
            max(each.age_s for each in looks),
            max(each.turn_age_s for each in looks),
            trouble,
        )

    def __str__(self) -> str:
        text = (
            f"{self.complete} of {self.looks} complete, p50 {self.p50_s:.2f} s, p99 {self.p99_s:.2f} s, "
            f"longest {self.longest_s:.2f} s, oldest answer {self.oldest_s:.2f} s, turn {self.oldest_turn_s:.2f} s"
        )
        return f"{text}; first incomplete: {self.trouble.splitlines()[0][:200]}" if self.trouble else text


def looks(environment: Mapping[str, str], agents: int, count: int, limit_s: float) -> LookFigures:
    """Runs `kvctl status` up to `count` times, no more after `limit_s`."""
    look(environment)  # compiles its modules
    end, found = time.monotonic() + limit_s, [look(environment)]
    while len(found) < count and time.monotonic() < end:
        found.append(look(environment))
    return LookFigures.of(found, agents)


class Watch:
    """`kvctl status -w` at a rate in Hz; a context manager.

    Attributes:
        readings: number of lines that it printed so far.
    """

    def __init__(self, environment: Mapping[str, str], rate: float) -> None:
        self._process = subprocess.Popen(
            [*KVCTL, "status", "-w", f"{1 / rate:g}", "-o", "tsv"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environment, "PYTHONUNBUFFERED": "1"},
        )
        self.readings = 0
        self._begun = threading.Event()
        self._counter = threading.Thread(target=self._count)
        self._counter.start()

    def _count(self) -> None:
        assert self._process.stdout is not None
        for _ in self._process.stdout:
            self.readings += 1
            self._begun.set()
        self._begun.set()

    def wait(self) -> None:
        """Waits for the first reading.

        Raises:
            SystemExit: there is none.
        """
        if not self._begun.wait(LOOK_S) or not self.readings:
            raise SystemExit("kvctl status -w printed nothing")

    def pause(self) -> None:
        """Stops the process until `resume`."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.resume()
        self._process.terminate()
        self._process.wait(10)
        self._counter.join()


class Engine:
    """A process with two agents and a spinning engine's thread; a context manager.

    Args:
        kind: "idle" or "busy".
        directory: that of the admin sockets.
    """

    def __init__(self, kind: str, directory: Path, transport: str) -> None:
        self.environment = {**os.environ, "KVCTL_SOCKET_DIR": str(directory)}
        counter = directory / "turns"
        counter.write_bytes(bytes(8))
        with counter.open("r+b") as file:
            self._turns = mmap.mmap(file.fileno(), 8)
        command = [sys.executable, __file__, "--run", kind, "--transport", transport]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.environment
        )
        assert self._process.stdout is not None
        ready, _, thread = self._process.stdout.readline().strip().partition(" ")
        if ready != "ready":
            raise SystemExit("the engine's process did not start")
        self._times = Path(f"/proc/{self._process.pid}/task/{thread}/schedstat")

    def core_ns(self) -> int:
        """Returns the processor time of the engine's thread so far."""
        return int(self._times.read_text().split()[0])

    def turns(self) -> int:
        """Returns the number of turns of the engine's loop so far."""
        return int.from_bytes(self._turns[:], "little")

    def window(self, seconds: float) -> tuple[float, float]:
        """Returns turns per second, and the share of a core that the engine's thread had."""
        turns, core_ns, started = self.turns(), self.core_ns(), time.perf_counter()
        time.sleep(seconds)
        took = time.perf_counter() - started
        return (self.turns() - turns) / took, (self.core_ns() - core_ns) / took / 1e9

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=30)
        self._turns.close()


def run_engine(kind: str, transport: str) -> None:
    """Runs the agents and the engine's thread until stdin ends."""
    import zmq

    from kvctl_agent import Agent, KVPool, ModelShape, Rank, local_shards

    shape, rank = ModelShape(4, 8, 128, 128, 2), Rank()
    directory = os.environ["KVCTL_SOCKET_DIR"]
    with contextlib.ExitStack() as stack:
        agents = []
        for role in ("prefill", "decode"):
            pool = KVPool.allocate(local_shards(shape, 16, rank.parallel_config, rank.coord), 16, 64)
            options: dict[str, Any] = {"staging_ring_mb": 16, "staging_buffer_mb": 16, "transport": transport}
            options |= {"name": f"{role}-0", "bootstrap": f"ipc://{directory}/registry", "model": shape}
            agent = Agent(role=role, rank=rank, pool=pool, **options)
            agents.append(stack.enter_context(agent.start()))
        agents[1].wait_ready(timeout=30)
        with Path(directory, "turns").open("r+b") as file:
            turns = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        socket.bind(f"ipc://{directory}/requests")
        done = threading.Event()

        def spin() -> None:
            while not done.is_set():
                total = 0
                for number in range(300):
                    total += number
                if kind == "idle":
                    with contextlib.suppress(zmq.Again):
                        socket.recv(zmq.NOBLOCK)
                turns[0] += 1

        thread = threading.Thread(target=spin)
        thread.start()
        print(f"ready {thread.native_id}", flush=True)
        sys.stdin.read()
        done.set()
        thread.join()
        socket.close(0)


class Cost(NamedTuple):
    """Turns of the engine per second, alone and observed: means of many short windows in turns.

    Attributes:
        loss: share of its turns that the engine loses to the observers.
        error: standard error of `loss`.
        core_loss, core_error: the same of the share of a core that the engine's thread has.
    """

    alone: float
    observed: float
    loss: float
    error: float
    core_loss: float
    core_error: float
    readings_per_s: float

    def __str__(self) -> str:
        return (
            f"{self.alone:,.0f} turns/s alone, {self.observed:,.0f} observed {self.readings_per_s:.0f} times a second: "
            f"{self.loss:+.2%} ± {self.error:.2%} lost; of the thread's processor time "
            f"{self.core_loss:+.2%} ± {self.core_error:.2%}"
        )


def cost(engine: Engine, rate: float, rounds: int, seconds: float) -> Cost:
    """Measures `rounds` pairs of windows, one of them observed; which one comes first changes each time."""
    alone: list[tuple[float, float]] = []
    observed: list[tuple[float, float]] = []
    readings = 0
    with Watch(engine.environment, rate) as watch:
        watch.wait()
        for number in range(rounds):
            for watched in (False, True) if number % 2 else (True, False):
                if not watched:
                    watch.pause()
                before = watch.readings
                (observed if watched else alone).append(engine.window(seconds))
                if watched:
                    readings += watch.readings - before
                else:
                    watch.resume()
    (turns, cores), (observed_turns, observed_cores) = zip(*alone, strict=True), zip(*observed, strict=True)
    mean = statistics.fmean
    return Cost(
        mean(turns),
        mean(observed_turns),
        *_loss(turns, observed_turns),
        *_loss(cores, observed_cores),
        readings / (rounds * seconds),
    )


def _loss(alone: Sequence[float], observed: Sequence[float]) -> tuple[float, float]:
    """Returns the share that is lost, and its standard error."""
    losses = [1 - with_them / without for without, with_them in zip(alone, observed, strict=True)]
    return 1 - statistics.fmean(observed) / statistics.fmean(alone), statistics.stdev(losses) / math.sqrt(len(losses))


@contextlib.contextmanager
def socket_directory() -> Iterator[Path]:
    """Yields a new directory for admin sockets, short enough for their addresses."""
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as directory:
        Path(directory).chmod(0o700)
        yield Path(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["idle", "busy"], action="append", help="only this one")
    parser.add_argument("--looks", type=int, default=100, help="calls of kvctl status")
    parser.add_argument("--looks-s", type=float, default=600.0, help="no more of them after this time")
    parser.add_argument("--rate", type=float, default=100.0, help="readings per second of the observers")
    parser.add_argument("--rounds", type=int, default=100, help="pairs of windows; 0: none")
    parser.add_argument("--seconds", type=float, default=0.25, help="of a window")
    parser.add_argument("--transport", default="nixl")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run_engine(options.run, options.transport)
        return
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    for kind in options.engine or ["idle", "busy"]:
        with socket_directory() as directory, Engine(kind, directory, options.transport) as engine:
            print(f"{kind} engine: {looks(engine.environment, 2, options.looks, options.looks_s)}", flush=True)
            if options.rounds:
                print(f"{kind} engine: {cost(engine, options.rate, options.rounds, options.seconds)}", flush=True)


if __name__ == "__main__":
    main()
