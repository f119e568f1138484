"""A synthetic fleet of 152 agents on 19 hosts, with a silent host, asked by a kvctl with few file descriptors."""

from __future__ import annotations

import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import orjson
import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "large_fleet.py"
SHAPE = "--agents 152 --hosts 19 --peers 16 --rooms 4 --silent 1 --silent-hosts 1 --odd 1"
DEADLINE_S = 60
DESCRIPTORS = 160  # too few for all agents at once


@pytest.fixture
def environment(canned: ModuleType, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The variables under which kvctl finds the fleet, which runs meanwhile."""
    samples = {}
    for name in ("prefill-0", "decode-0"):
        answers = canned.answers(name)
        commands = ("status", "staging", "layers", "peers", "events", "metrics", "config")
        sample = {command: answers[command]({}) for command in commands}
        sample |= {command: answers[command]({"limit": 50}) for command in ("rooms", "history", "slow", "failed")}
        sample["status"]["integration"] = None
        sample["hello"] = {**canned.hello(name), "capabilities": ["health"]}
        for row in sample["peers"]:
            row |= {"state": "ready", "differences": [], "former": []}
        samples[name.split("-")[0]] = sample
    recorded = tmp_path / "samples.json"
    recorded.write_bytes(orjson.dumps(samples))
    command = [sys.executable, str(SCRIPT), "--serve", "--recording", str(recorded), *SHAPE.split()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert select.select([process.stdout], [], [], DEADLINE_S)[0], f"the fleet did not start in {DEADLINE_S} s"
        yield {**os.environ, **dict(pair.split("=", 1) for pair in process.stdout.readline().split())}
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(DEADLINE_S)
        process.stdout.close()


def kvctl(environment: dict[str, str], *args: str) -> tuple[int, Any]:
    """Returns the exit code and the JSON of a command that may open few descriptors."""
    done = subprocess.run(
        [sys.executable, "-m", "kvctl", "--timeout", "3s", *args, "-o", "json"],
        env=environment,
        stdout=subprocess.PIPE,
        timeout=DEADLINE_S,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS)),
    )
    return done.returncode, orjson.loads(done.stdout)


def test_a_silent_host_and_few_descriptors_cost_no_answer(environment: dict[str, str]) -> None:
    code, found = kvctl(environment, "status")
    answered = [row for row in found["data"] if "rank" in row]
    assert (code, len(answered), len(found["errors"])) == (7, 143, 9)
    silent = {error["agent"] for error in found["errors"]}
    assert {name for name in silent if name.startswith("h009-")} == {f"h009-decode-{rank}" for rank in range(8)}
    odd = [row["name"] for row in answered if "KV_PEER_LOST" in row["health"]]
    assert odd == ["h010-prefill-4"]  # the peer that it has lost is on the silent host
