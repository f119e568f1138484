"""The work of `cost` grows with the peers and the rooms, not with their product: it runs beside transfers."""

from __future__ import annotations

from types import SimpleNamespace as Namespace
from typing import Any

from kvctl_agent.admin.transfer_costs import TransferCosts


def test_rooms_are_listed_once_for_all_peers() -> None:
    peers = {
        name: Namespace(
            name=name,
            inputs=None,
            incarnation=1,
            coord=Namespace(dp=0),
            info=None,
            state=Namespace(value="lost"),
            usable=False,
        )
        for name in ("decode-0", "decode-1", "decode-2")
    }
    records = [Namespace(room=room, peers=[f"decode-{room % 2}"]) for room in range(5)]
    listed: list[None] = []

    def active() -> list[Any]:
        listed.append(None)
        return records

    transfers = Namespace(in_transfer=lambda: dict.fromkeys(range(4), 16), fit=lambda name, now_ns: None)
    telemetry = Namespace(transfers=transfers, rooms=Namespace(active=active))
    parts: Any = Namespace(role="prefill", name="prefill-0", machine=Namespace(peers=peers), telemetry=telemetry)
    parts.local, parts.chooser = Namespace(coord=Namespace(dp=0)), None
    _, rows = TransferCosts(parts).read(100)
    assert {row["peer"]: row["rooms"] for row in rows} == {"decode-0": 2, "decode-1": 2, "decode-2": 0}
    assert len(listed) == 1
