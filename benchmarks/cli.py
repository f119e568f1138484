"""Measures the wall time of `kvctl` calls: without agents, with 8 and 256 agents, and with 256 of which some failed.

The agents are real admin servers with fixed answers. They are threads of one other process and share one core, so with
many agents their time is part of the result. A dead agent is a socket file without a process; a hung agent accepts
connections and never answers, so the call lasts until --timeout.

    python benchmarks/cli.py
    python benchmarks/cli.py --times 21 --agents 64
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.top import Agents

KVCTL = (sys.executable, "-m", "kvctl")
ROOMS = 50
AILING = 16
TIMEOUT = "500ms"
PATIENT = ("--timeout", "20s")  # on a busy machine the calls take longer instead of failing


def median_ms(times: int, code: int, *args: str, **environment: str) -> tuple[float, float]:
    """Returns the median wall time and processor time of a `kvctl` call, in ms; load affects the latter less.

    Args:
        times: number of calls.
        code: expected exit code.
        args: arguments of `kvctl`.
        environment: additional environment variables.

    Raises:
        SystemExit: a call ended with another exit code.
    """
    taken, used = [], []
    for _ in range(times):
        started, before = time.perf_counter(), _children_s()
        done = subprocess.run(
            [*KVCTL, *args], capture_output=True, text=True, env={**os.environ, **environment}, check=False
        )
        taken.append((time.perf_counter() - started) * 1e3)
        used.append((_children_s() - before) * 1e3)
        if done.returncode != code:
            sys.exit(f"kvctl {' '.join(args)} exited {done.returncode}, not {code}: {done.stderr[-500:]}")
    return statistics.median(taken), statistics.median(used)


def _children_s() -> float:
    """Returns the processor time of all child processes that have been waited for, in seconds."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@contextlib.contextmanager
def fleet(agents: int, dead: int = 0, hung: int = 0) -> Iterator[dict[str, str]]:
    """Runs admin servers, and yields the environment in which `kvctl` finds them.

    Args:
        agents: number of agents in all.
        dead: how many of them are sockets without a process.
        hung: how many of them accept connections and never answer.
    """
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as directory, contextlib.ExitStack() as stack:
        Path(directory).chmod(0o700)
        living = Agents(agents - dead - hung, ROOMS, directory)
        stack.callback(living.close)
        for number in range(dead + hung):
            ailing = stack.enter_context(socket.socket(socket.AF_UNIX))
            ailing.bind(f"{directory}/ailing-{number}.sock")
            if number >= dead:
                ailing.listen(64)
        yield {"KVCTL_SOCKET_DIR": directory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=9, help="calls that a median is of")
    parser.add_argument("--agents", type=int, default=256, help="of the large fleet")
    options = parser.parse_args()

    def say(what: str, limit_ms: int, code: int, *args: str, **environment: str) -> None:
        wall, processor = median_ms(options.times, code, *args, **environment)
        print(f"{what:<46}{wall:8.0f} ms   aim {limit_ms:4} ms   processor {processor:4.0f} ms", flush=True)

    print(f"medians of {options.times}, load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    say("kvctl --version", 150, 0, "--version")
    say("kvctl --help", 150, 0, "--help")
    say("TAB after kvctl ro", 200, 0, "ro", _KVCTL_COMPLETE="zsh")
    with fleet(8) as found:
        say("kvctl status, 8 agents", 300, 0, "status", **found)
        say("kvctl rooms -o json, 8 agents", 300, 0, "rooms", "-o", "json", **found)
        say("TAB after kvctl rooms show, 8 agents", 200, 0, "rooms", "show", "", _KVCTL_COMPLETE="zsh", **found)
    with fleet(options.agents) as found:
        say(f"kvctl status, {options.agents} agents", 1500, 0, "status", *PATIENT, **found)
        say(f"kvctl agents, {options.agents} agents", 1500, 0, "agents", *PATIENT, **found)
    with fleet(options.agents, dead=AILING) as found:
        # kvctl status does not query stale sockets; only `kvctl agents` lists them.
        say(f"kvctl status, {AILING} of them dead", 1500, 0, "status", *PATIENT, **found)
    with fleet(options.agents, hung=AILING) as found:
        args = ("status", "--timeout", TIMEOUT)
        say(f"kvctl status, {AILING} of them hung ({TIMEOUT} to answer)", 1500, 7, *args, **found)


if __name__ == "__main__":
    main()
