"""Hosts on one machine, joined by a network whose links can be made to lose, delay, filter or cut.

A host is a set of namespaces (network, PID, IPC, UTS, mount) that a process holds: it has its own interface, addresses,
host name and process ids, so that agents on two hosts can neither share memory nor see each other die. All hosts are
ports of one bridge, which is in a namespace of its own: nothing of it has a name outside, two networks cannot collide,
and all of it ends with the processes that hold it, however the test ends.

Faults are in the network, where the sending kernel does not see them: packets that a host must not get are dropped by
nftables before its own kernel reads them. Delay needs no `netem`, which few kernels of virtual machines and containers
have: `delay_line` carries the frames of a host between two TAP devices.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_TOOLS = ("ip", "tc", "nft", "ping", "unshare", "nsenter")
_NAMESPACES = ("--net", "--pid", "--ipc", "--uts", "--mount")
_READY_S = 30.0
_HOLD = "mount -t proc proc /proc && mount -t sysfs sysfs /sys && hostname {name} && echo ready && exec cat"
_BRIDGE = "br0"
_CONTROL_BYTES = 1000
"""IP packets up to this size pass a link with a broken MTU: handshakes, acknowledgements, heartbeats."""


def missing() -> str:
    """Returns the reason why this machine cannot have such hosts; "" if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if lacking := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"not installed: {', '.join(lacking)} (Debian: iproute2, nftables, iputils-ping, util-linux)"
    if not Path("/dev/net/tun").exists():
        return "no /dev/net/tun"
    probe = [*_unshare(), "sh", "-c", "ip link add type veth && nft add table inet probe"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False, timeout=_READY_S)
    return f"the kernel refuses: {done.stderr.strip()[:200]}" if done.returncode else ""


def _unshare() -> list[str]:
    return ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--"]


class Host:
    """One host: `name` is its host name, `ipv4` and `ipv6` are its addresses on the bridge.

    Attributes:
        port: name of the bridge's end of its link.
    """

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.ipv4 = f"10.77.0.{number}"
        self.ipv6 = f"fd77::{number}"
        self.port = f"port-{number}"
        self.rules: dict[str, list[str]] = {}
        self._holder = subprocess.Popen(
            [*_unshare(), "sh", "-c", _HOLD.format(name=name)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert self._holder.stdout is not None
            if self._holder.stdout.readline() != b"ready\n":
                raise RuntimeError(f"the namespaces of {name} were not created")
            children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text()
            self.pid = int(children.split()[0])
        except BaseException:
            self.close()
            raise

    def program(self, command: Sequence[str]) -> list[str]:
        """Returns the command line that runs a command on this host."""
        return ["nsenter", "--target", str(self.pid), "--net", "--pid", "--ipc", "--uts", "--mount", "--", *command]

    def run(
        self, *command: str, text: str = "", check: bool = True, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on this host to its end.

        Args:
            text: its standard input.
            check: whether a failure is an error of the test.
        """
        done = subprocess.run(
            self.program(command),
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env={**os.environ, **(environment or {})},
        )
        if check and done.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
        return done

    def close(self) -> None:
        """Ends every process of the host, and with the last one its namespaces."""
        self._holder.kill()
        self._holder.wait()
        for pipe in (self._holder.stdin, self._holder.stdout):
            if pipe is not None:
                pipe.close()


class Network:
    """Hosts `n1`, `n2`, … on one bridge, and the faults between them. A context manager.

    A fault lasts until `heal`. Faults have a direction: they meet what `source` sends to `target`.
    """

    def __init__(self, count: int) -> None:
        """Creates `count` hosts whose links work."""
        self._stack = contextlib.ExitStack()
        self._relays: list[subprocess.Popen[bytes]] = []
        self.hosts: dict[str, Host] = {}
        try:
            self._switch = self._stack.enter_context(contextlib.closing(Host("switch", 0)))
            self._switch.run("ip", "link", "add", _BRIDGE, "type", "bridge")
            self._switch.run("ip", "link", "set", _BRIDGE, "up")
            for number in range(1, count + 1):
                host = self._stack.enter_context(contextlib.closing(Host(f"n{number}", number)))
                self.hosts[host.name] = host
                self._join(host)
        except BaseException:
            self._stack.close()
            raise

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._end_relays()
        self._stack.close()

    def _join(self, host: Host) -> None:
        # In the switch's network alone: in its PID namespace, the other host's process would have no number.
        network = ["nsenter", "--target", str(self._switch.pid), "--net", "--"]
        veth = ["ip", "link", "add", host.port, "type", "veth", "peer", "name", "eth0", "netns", str(host.pid)]
        subprocess.run([*network, *veth], check=True, timeout=_READY_S)
        self._switch.run("ip", "link", "set", host.port, "master", _BRIDGE, "up")
        host.run("ip", "link", "set", "lo", "up")
        host.run("ip", "address", "add", f"{host.ipv4}/24", "dev", "eth0")
        host.run("ip", "address", "add", f"{host.ipv6}/64", "dev", "eth0", "nodad")
        # Packets as large as those of a wire, or losing one would lose 64 KiB.
        host.run("ip", "link", "set", "eth0", "gso_max_segs", "1", "up")

    # ---- faults -----------------------------------------------------------------------------------------------------

    def drop(self, source: str, target: str, match: str = "") -> None:
        """Drops the packets from one host to another that an nftables expression matches; all if it is empty."""
        sender, receiver = self.hosts[source], self.hosts[target]
        self._add(receiver, source, f"ip saddr {sender.ipv4} {match} drop")
        self._add(receiver, source, f"ip6 saddr {sender.ipv6} {match} drop")

    def part(self, first: str, second: str) -> None:
        """Drops everything between two hosts, in both directions."""
        self.drop(first, second)
        self.drop(second, first)

    def isolate(self, name: str) -> None:
        """Drops everything between a host and all others, as if it were cut off or had no power."""
        for other in self.hosts:
            if other != name:
                self.part(name, other)

    def lose(self, source: str, target: str, percent: float) -> None:
        """Drops packets at random."""
        self.drop(source, target, f"numgen random mod 1000 < {round(percent * 10)}")

    def limit_packets(self, source: str, target: str) -> None:
        """Drops packets of more than 1,000 bytes, and tells nobody: a link whose MTU is too small."""
        self.drop(source, target, f"meta length > {_CONTROL_BYTES}")

    def drop_family(self, source: str, target: str, family: str) -> None:
        """Drops the packets of one address family, "ip" or "ip6"."""
        sender = self.hosts[source]
        self._add(self.hosts[target], source, f"{family} saddr {sender.ipv4 if family == 'ip' else sender.ipv6} drop")

    def unplug(self, name: str) -> None:
        """Takes a host's link down: nobody hears of it any more, and no packet tells why."""
        self._switch.run("ip", "link", "set", self.hosts[name].port, "down")

    def heal(self, target: str | None = None) -> None:
        """Ends all faults, or those of packets that `target` gets."""
        for host in self.hosts.values():
            if target in (None, host.name) and host.rules:
                host.rules.clear()
                self._apply(host)
        if target is None:
            self._end_relays()
            self.unlimit()
            for host in self.hosts.values():
                self._switch.run("ip", "link", "set", host.port, "up")

    def limit_rate(self, target: str, mbit: float) -> None:
        """Limits the rate of everything that a host receives."""
        tbf = ["tbf", "rate", f"{mbit}mbit", "burst", "32kbit", "latency", "100ms"]
        self._switch.run("tc", "qdisc", "replace", "dev", self.hosts[target].port, "root", *tbf)

    def unlimit(self) -> None:
        """Ends all limits of rates."""
        for host in self.hosts.values():
            self._switch.run("tc", "qdisc", "del", "dev", host.port, "root", check=False)

    def delay(self, name: str, seconds: float) -> None:
        """Delays everything that a host sends and receives by `seconds` in each direction."""
        host = self.hosts[name]
        number = host.port.rpartition("-")[2]
        near, far, bridge = f"near-{number}", f"far-{number}", f"brd-{number}"
        self._switch.run("ip", "link", "add", bridge, "type", "bridge")
        line = [sys.executable, str(Path(__file__).with_name("delay_line.py")), near, far, str(seconds)]
        relay = subprocess.Popen(self._switch.program(line), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._relays.append(relay)
        assert relay.stdout is not None
        if relay.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the delay of {name} was not set up")
        self._switch.run("ip", "link", "set", near, "master", bridge, "up")
        self._switch.run("ip", "link", "set", far, "master", _BRIDGE, "up")
        self._switch.run("ip", "link", "set", bridge, "up")
        self._switch.run("ip", "link", "set", host.port, "master", bridge)

    def _end_relays(self) -> None:
        for relay in self._relays:
            assert relay.stdin is not None
            assert relay.stdout is not None
            relay.stdin.close()  # upon which it exits
            relay.wait(_READY_S)
            relay.stdout.close()
        if self._relays:
            self._relays.clear()
            for host in self.hosts.values():
                self._switch.run("ip", "link", "set", host.port, "master", _BRIDGE)
                self._switch.run("ip", "link", "del", f"brd-{host.port.rpartition('-')[2]}", check=False)

    def _add(self, receiver: Host, source: str, rule: str) -> None:
        receiver.rules.setdefault(source, []).append(rule)
        self._apply(receiver)

    def _apply(self, host: Host) -> None:
        rules = "\n".join(rule for each in host.rules.values() for rule in each)
        # Before the kernel of the host reads them, and before it tracks connections.
        chain = f"chain arriving {{ type filter hook prerouting priority -400;\n{rules}\n}}"
        host.run(
            "nft", "-f", "-", text=f"table inet faults\ndelete table inet faults\ntable inet faults {{\n{chain}\n}}\n"
        )
