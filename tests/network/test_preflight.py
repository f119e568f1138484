"""`kvctl preflight` between four hosts: a healthy network passes, and faults are named with the pair of hosts."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.network.hosts import Network

PATIENCE_S = 60.0
PORT = 7001
LAYOUT = ("--prefill-tp", "2", "--decode-dp", "2")
# Two ports each: nft would compare both fields at once with single ones, and match more.
DATA_PORTS = f"tcp dport != {{ {PORT}, 7311 }} tcp sport != {{ {PORT}, 7311 }}"
# Long enough for a busy machine, and what a test of a fault waits for a few times.
DEADLINE = ("--deadline", "15s", "--port", str(PORT))


class Hosts:
    """Four hosts, and the command line of a preflight between them."""

    def __init__(self, network: Network, directory: Path) -> None:
        self.network = network
        login = directory / "login"
        cases = [f'{host.name}) exec {" ".join(host.program([]))} "$@" ;;' for host in network.hosts.values()]
        login.write_text("\n".join(["#!/bin/sh", "host=$1", "shift", "case $host in", *cases, "esac", "exit 255"]))
        login.chmod(0o755)
        self.command = [
            *(sys.executable, "-m", "kvctl", "preflight", *LAYOUT, "--ssh", str(login), "--python", sys.executable),
            *(f"{host.name}={host.ipv4}" for host in network.hosts.values()),
        ]
        # nsenter leaves the working directory, from which a checkout is imported.
        self.environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "KVCTL_CONFIG": "/dev/null"}

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        command = [*self.command, *options]
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False, timeout=10 * PATIENCE_S
        )

    def found(self, *options: str) -> tuple[int, dict[str, Any]]:
        """Runs a preflight; returns its exit code and its data."""
        done = self.run(*options, "-o", "json")
        assert done.stdout, done.stderr
        (data,) = json.loads(done.stdout)["data"]
        return done.returncode, data


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network(4) as network:
        yield network


@pytest.fixture
def hosts(network: Network, tmp_path: Path) -> Iterator[Hosts]:
    yield Hosts(network, tmp_path)
    network.heal()


def problems(data: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Returns severity, code and subject of the findings that make a preflight fail."""
    return [
        (each["severity"], each["code"], each["subject"]) for each in data["findings"] if each["severity"] != "info"
    ]


def verdicts(data: dict[str, Any]) -> dict[str, str]:
    return {f"{row['prefill_host']} → {row['decode_host']}": row["verdict"] for row in data["pairs"]}


@pytest.mark.parametrize("transport", ["nixl", "mooncake"])
def test_a_healthy_network_passes_and_the_lane_is_proven(hosts: Hosts, transport: str) -> None:
    code, data = hosts.found("--deadline", "30s", "--transport", transport)
    assert (code, data["ok"], problems(data), data["failed_ranks"]) == (0, True, [], {}), data["findings"]
    assert set(verdicts(data).values()) == {"ok"}
    for row in data["pairs"]:
        assert (row["lane"], row["lane_source"], list(row["carried"])) == ("tcp", "counters", ["eth0"]), row
        assert row["carried"]["eth0"] > 0.5 * row["moved_bytes"] > 0
        assert (row["gb_per_s"] > 0, row["latency_ns"] > 0, row["mtu"]) == (True, True, 1500)
    assert len(data["links"]) == 8
    assert [each["host"] for each in data["hosts"]] == ["n1", "n2", "n3", "n4"]
    for host in data["hosts"]:
        assert abs(host["clock_offset_ns"]) <= host["clock_error_ns"] + 5_000_000
        topics = {each["topic"] for each in host["checks"]}
        assert {"locked memory", "/dev/shm", "PID namespace"} <= topics


@pytest.mark.sample
def test_a_slow_host_is_named_with_its_pairs(hosts: Hosts) -> None:
    hosts.network.limit_rate("n4", 8)
    code, data = hosts.found("--deadline", "30s")
    assert code == 1
    assert ("warning", "KV_LANE_SLOW", "n1 and n2 → n4") in problems(data), data["findings"]
    assert verdicts(data) == {"n1 → n3": "ok", "n2 → n3": "ok", "n1 → n4": "warning", "n2 → n4": "warning"}
    (finding,) = [each for each in data["findings"] if each["code"] == "KV_LANE_SLOW"]
    assert (finding["evidence"]["lane"], finding["evidence"]["lane_source"]) == ("tcp", "counters")


def test_a_blocked_port_is_named_and_bytes_still_pass(hosts: Hosts) -> None:
    hosts.network.drop("n1", "n3", f"tcp dport {PORT}")
    code, data = hosts.found(*DEADLINE)
    assert (code, problems(data)) == (1, [("critical", "KV_PEER_LOST", "n1 → n3")]), data["findings"]
    (finding,) = [each for each in data["findings"] if each["code"] == "KV_PEER_LOST"]
    assert f"port {PORT}" in finding["cause"]
    assert "a firewall" in finding["cause"]
    assert set(verdicts(data).values()) == {"ok"}


def test_an_mtu_hole_is_named(hosts: Hosts) -> None:
    hosts.network.limit_packets("n1", "n3")
    code, data = hosts.found(*DEADLINE)
    assert (code, problems(data)) == (1, [("critical", "KV_DATA_BLOCKED", "n1 → n3")]), data["findings"]
    (finding,) = [each for each in data["findings"] if each["code"] == "KV_DATA_BLOCKED"]
    assert "ping -c 3 -M do -s 1472" in finding["remedy"]
    assert verdicts(data)["n1 → n3"] == "critical"


def test_filtered_ports_of_the_engine_are_told_from_a_dead_link(hosts: Hosts) -> None:
    for source, target in (("n1", "n3"), ("n3", "n1")):
        hosts.network.drop(source, target, DATA_PORTS)
    done = hosts.run(*DEADLINE)
    assert done.returncode == 1
    assert "KV_DATA_BLOCKED  n1 → n3" in done.stdout, done.stdout
    assert "a firewall drops the engine's ports" in " ".join(done.stdout.split())
    assert "KV_PEER_LOST" not in done.stdout


def test_everything_that_was_started_ends_with_a_killed_client(hosts: Hosts) -> None:
    hosts.network.part("n1", "n3")  # a preflight that takes a while
    client = subprocess.Popen(
        [*hosts.command, "--deadline", "60s"],
        env=hosts.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    started: list[int] = []
    try:
        deadline = time.monotonic() + PATIENCE_S
        while len(started) < 4:
            assert client.poll() is None, "the preflight ended before it was killed"
            assert time.monotonic() < deadline, f"{len(started)} of 4 ranks were started within {PATIENCE_S:g} s"
            time.sleep(0.1)
            started = _ranks(client.pid)
        watched = [os.pidfd_open(pid) for pid in started]
        client.send_signal(signal.SIGKILL)
        client.wait()
        for descriptor in watched:
            ended, _, _ = select.select([descriptor], [], [], PATIENCE_S)
            assert ended, f"a rank still ran {PATIENCE_S:g} s after the client was killed"
            os.close(descriptor)
    finally:
        client.kill()
        client.wait()


def _ranks(pid: int) -> list[int]:
    """Returns the processes of ranks below a process: Pythons, not what has brought them to their hosts."""
    found: list[int] = []
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for child in map(int, children):
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if words[0] == sys.executable.encode() and b"kvctl.lab.preflight" in words:
                found.append(child)
            found += _ranks(child)
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found
