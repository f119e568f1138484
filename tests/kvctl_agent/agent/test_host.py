"""The host name that an agent reports, of itself and of its peers."""

from __future__ import annotations

import socket
from typing import Any


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
