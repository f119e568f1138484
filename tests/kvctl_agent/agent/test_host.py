"""The host name that an agent reports, of itself and of its peers."""

from __future__ import annotations

import socket
from typing import Any

import msgspec


def test_agents_report_the_names_of_their_own_and_of_their_peers_hosts(make_fleet: Any) -> None:
    fleet = make_fleet(prefill=(1, 1))
    fleet.prefill.append(fleet.prefill_agent(0, host="gpu-7").start())
    fleet.decode.append(fleet.decode_agent(0).start())
    prefill, decode = fleet.prefill[0], fleet.decode[0]
    decode.wait_ready(60)
    fleet.run(7, 2)
    here = socket.gethostname()
    assert [each.observe.hello()["host"] for each in (prefill, decode)] == ["gpu-7", here]
    assert [each.observe.status()["host"] for each in (prefill, decode)] == ["gpu-7", here]
    assert [row["peer_host"] for row in prefill.observe.peers()] == [here]
    assert [row["peer_host"] for row in decode.observe.peers()] == ["gpu-7"]
    assert decode.observe.peers()[0]["process"].endswith(" on gpu-7")
    fleet.settle()


def test_an_address_that_a_peer_tells_is_shown_if_it_is_one(make_fleet: Any) -> None:
    fleet = make_fleet().start()
    decode = fleet.decode[0]
    decode.wait_ready(60)
    peer = next(iter(decode.parts.machine.peers.values()))
    told = ["10.0.0.9", "fd00::9", "fe80::9%eth0.7", "10.0.0.9; reboot", "fe80::9%x; reboot", "n1", ""]
    shown = []
    for peer_address in told:
        peer.info = msgspec.structs.replace(peer.info, address=peer_address)
        shown.append(next(row["address"] for row in decode.observe.peers() if row["peer"] == peer.name))
    assert shown == [*told[:3], None, None, None, None]
