"""Counters of real interfaces: a transfer over TCP between two network namespaces, without and with loss."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kvctl.health.fleets import Fleet

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces, which needs root"),
    pytest.mark.skipif(not shutil.which("nft") or not shutil.which("ip"), reason="needs iproute2 and nftables"),
]
ROOT = Path(__file__).parents[3]
NBYTES = 24 << 20

SENDER = """
import json, socket, subprocess, sys, time
from types import SimpleNamespace
from kvctl_agent.admin.nics import NicQuery

def ip(text):
    subprocess.run(["ip", *text.split()], check=True)

receiver, nbytes = map(int, sys.argv[1:])
ip("link add rail0 type veth peer name rail1")
ip(f"link set rail1 netns {receiver}")
ip("addr add 10.9.0.1/24 dev rail0")
ip("link set rail0 up")
print("ready", flush=True)
port = int(sys.stdin.readline())
peers = [{"peer": "decode-0", "endpoint": f"tcp://10.9.0.2:{port}"}]
described = {"transport": {"engine": "nixl"}}
rank = SimpleNamespace(
    name="prefill-0", host="node-1", gpu_pci=None, peers=lambda: peers, describe=lambda: described
)
before = NicQuery(rank)()
with socket.create_connection(("10.9.0.2", port), 60) as client:
    client.sendall(bytes(nbytes))
    client.shutdown(socket.SHUT_WR)
    assert client.recv(1) == b"."
print(json.dumps([before, NicQuery(rank)()]))
"""
RECEIVER = '''
import socket, subprocess, sys
print("ready", flush=True)
sys.stdin.readline()
for command in ("link set lo up", "addr add 10.9.0.2/24 dev rail1", "link set rail1 up"):
    subprocess.run(["ip", *command.split()], check=True)
if loss := int(sys.argv[1]):
    rules = f"""
    add table inet loss
    add chain inet loss arriving {{ type filter hook input priority 0; }}
    add rule inet loss arriving numgen random mod 100 < {loss} drop
    """
    subprocess.run(["nft", "-f", "-"], input=rules, text=True, check=True)
with socket.create_server(("10.9.0.2", 0)) as server:
    print(server.getsockname()[1], flush=True)
    client, _ = server.accept()
    with client:
        while client.recv(1 << 20):
            pass
        client.sendall(b".")
'''


def in_namespace(script: str, *args: object) -> subprocess.Popen[str]:
    """Starts a Python script in a network namespace of its own, with that namespace's /sys, as in a container."""
    enter = ["unshare", "--net", "--mount", "sh", "-c", 'mount -t sysfs sysfs /sys && exec "$@"', "sh"]
    command = [*enter, sys.executable, "-c", script, *map(str, args)]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "."},
    )


def transfer(loss_percent: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sends NBYTES from one namespace to another; returns the sender's answers to `nics` before and after."""
    with in_namespace(RECEIVER, loss_percent) as receiver:
        assert receiver.stdin is not None
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        with in_namespace(SENDER, receiver.pid, NBYTES) as sender:
            assert sender.stdin is not None
            assert sender.stdout is not None
            assert sender.stdout.readline() == "ready\n"
            receiver.stdin.write("go\n")
            receiver.stdin.flush()
            sender.stdin.write(receiver.stdout.readline())
            answers, _ = sender.communicate(timeout=120)
        assert receiver.wait(60) == 0
    before, after = json.loads(answers)
    return before, after


def findings(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    then, now = Fleet(), Fleet()
    then.answers["prefill-0"]["nics"], now.answers["prefill-0"]["nics"] = before, after
    return [f"{each.code} {each.subject}" for each in now.examine(then) if each.code.startswith("KV_NIC")]


def rail(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(nic for nic in answer["nics"] if nic["name"] == "rail0")
    return found


def test_the_bytes_are_found_on_the_interface_of_the_route() -> None:
    before, after = transfer(0)
    assert after["lane"] == {"devices": ["rail0"], "source": "route", "protocol": ""}
    assert rail(after)["sent_bytes_total"] - rail(before)["sent_bytes_total"] >= NBYTES
    assert (rail(after)["state"], rail(after)["bits_per_s"]) == ("up", 10 * 10**9)
    assert findings(before, after) == []


def test_lost_segments_are_reported() -> None:
    before, after = transfer(4)
    assert findings(before, after) == ["KV_NIC_ERRORS node-1 tcp"]
