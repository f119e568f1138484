"""The TCP connections of this host to one peer's host, as its kernel sees them: which way packets get lost.

The kernel knows what no process is told: that a handshake is not answered, that an answered one is not completed, and
that bytes are sent again and again. It does not know which process a half-open connection is for, so connections are
counted by the address of the other host.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Collection
from itertools import islice
from pathlib import Path

from kvctl_agent.contract.addresses import ip_address
from kvctl_agent.contract.snapshots import TcpConnections

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED, _OPENING, _HALF_OPEN = "01", "02", "03"
# The kernel keeps half-open connections for a minute, also after an outage; these are at most 7 s old. An agent that
# gets no answer opens a new connection every 3 s.
_MOST_ANSWERS = 2
_MOST = 65536  # connections of a host that are read, a millisecond for each thousand


def connections_to(addresses: Collection[str], tables: Collection[Path] = _TABLES) -> dict[str, TcpConnections]:
    """Returns the connections between this host and each of these numeric addresses, of all processes."""
    found: dict[str, TcpConnections] = {
        address: {
            "established": 0,
            "opening": 0,
            "half_open": 0,
            "unacknowledged_bytes": 0,
            "retransmits": 0,
        }
        for address in addresses
    }
    keys = {key: address for address in addresses if (key := _key(address)) is not None}
    for table in tables:
        with contextlib.suppress(OSError), table.open() as lines:
            for line in islice(lines, 1, _MOST):
                fields = line.split()
                if len(fields) > 6 and (address := keys.get(fields[2].partition(":")[0])) is not None:
                    _count(found[address], fields)
    return found


def _count(row: TcpConnections, fields: list[str]) -> None:
    """Adds one line of the kernel's table."""
    if fields[3] == _OPENING:
        row["opening"] += 1
    elif fields[3] == _HALF_OPEN:
        row["half_open"] += int(fields[6], 16) <= _MOST_ANSWERS
    elif fields[3] == _ESTABLISHED:
        row["established"] += 1
        again = int(fields[6], 16)
        if again:
            row["unacknowledged_bytes"] += int(fields[4].partition(":")[0], 16)
            row["retransmits"] = max(row["retransmits"], again)


def _key(address: str) -> str | None:
    """Returns an address as the kernel's table has it, and an IPv4 address as in the table of IPv4; None for a name."""
    if (ip := ip_address(address)) is None:
        return None
    return "".join(f"{socket.ntohl(word):08X}" for word in struct.unpack(f">{len(ip.packed) // 4}I", ip.packed))
