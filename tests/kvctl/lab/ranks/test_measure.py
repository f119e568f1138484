"""What a rank reads of its agent when a run is over."""

from __future__ import annotations

from typing import Any

from kvctl.lab.ranks import measure
from kvctl_agent.errors import RequestRefused


def test_a_room_that_its_agent_has_just_forgotten_spoils_no_report() -> None:
    """With many rooms the last ones still end, and push out others, while the report is made."""

    def layers(room: int) -> list[Any]:
        if room == 2:
            raise RequestRefused("unknown-room", "decode-3 knows no room 2, active or recent")
        return [{"stages": {"gather": {"p50_ns": room}, "wire": {"p50_ns": None}}}]

    assert measure.stages(layers, [1, 2, 3]) == {"gather": [1, 3]}
