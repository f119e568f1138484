"""The kernel's tables of TCP connections: recorded lines, and a connection of this process."""

from __future__ import annotations

import socket
from pathlib import Path

from kvctl_agent.observer.tcp_connections import connections_to

HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
IPV4 = HEADER + (
    "   0: 0100000A:1B59 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1\n"  # listens
    "   1: 0100000A:1B59 0300000A:C001 03 00000000:00000000 01:00000064 00000001     0        0 0\n"
    "   2: 0100000A:1B59 0300000A:C002 03 00000000:00000000 01:00000064 00000004     0        0 0\n"
    "   3: 0100000A:C003 0300000A:1B59 02 00000001:00000000 01:00000064 00000003     0        0 2\n"
    "   4: 0100000A:C004 0300000A:1B59 01 000A8000:00000000 01:00000064 00000005     0        0 3\n"
    "   5: 0100000A:C005 0300000A:1B59 01 00000400:00000000 01:00000064 00000000     0        0 4\n"
    "   6: 0100000A:C005 0400000A:1B59 01 00000400:00000000 01:00000064 00000007     0        0 4\n"
    "broken\n"
)
IPV6 = HEADER + (
    "   0: 000077FD000000000000000001000000:C001 000077FD000000000000000003000000:1B59 "
    "02 00000001:00000000 01:00000064 00000003     0        0 2\n"
)


def test_connections_are_counted_by_the_other_host(tmp_path: Path) -> None:
    (tmp_path / "tcp").write_text(IPV4)
    (tmp_path / "tcp6").write_text(IPV6)
    tables = [tmp_path / "tcp", tmp_path / "tcp6", tmp_path / "missing"]
    found = connections_to({"10.0.0.3", "fd77::3", "10.0.0.9", "node-3"}, tables)
    empty = {"established": 0, "opening": 0, "half_open": 0, "unacknowledged_bytes": 0, "retransmits": 0}
    assert found == {
        "10.0.0.3": {
            "established": 2,
            "opening": 1,
            "half_open": 1,
            "unacknowledged_bytes": 0xA8000,
            "retransmits": 5,
        },
        "fd77::3": {**empty, "opening": 1},
        "10.0.0.9": empty,
        "node-3": empty,
    }


def test_this_kernel_has_such_tables() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        assert connections_to({"127.0.0.1"})["127.0.0.1"]["established"] >= 2
