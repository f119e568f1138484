"""What a rank reads of its agent when a run is over."""

from __future__ import annotations

from types import SimpleNamespace
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


class TestLayerGroups:
    def groups(self, *events: tuple[str, int | None, tuple[int, int] | None]) -> int:
        parts = [SimpleNamespace(stage="wire", peer=peer, chunk=chunk, layers=layers) for peer, chunk, layers in events]
        return measure.layer_groups([SimpleNamespace(events=parts)], layers=8)  # type: ignore[list-item]

    def test_they_are_those_of_one_chunk_to_one_reader(self) -> None:
        assert self.groups(("a", 0, (0, 4)), ("a", 0, (4, 8)), ("b", 0, (0, 4)), ("a", 1, (0, 4))) == 2

    def test_draft_layers_state_and_aux_rows_are_none(self) -> None:
        assert self.groups(("a", 0, (0, 8)), ("a", 0, (8, 9)), ("a", None, (0, 4)), ("a", 0, None)) == 1

    def test_nothing_is_known_of_a_room_without_parts(self) -> None:
        assert self.groups() == 0
