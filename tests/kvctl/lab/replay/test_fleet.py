"""Live fleets, recorded over their admin sockets with `kvctl record` and replayed with `kvctl replay`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvctl.cli import run
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import DeviceError
from kvctl_agent.protocol import recording
from tests.support.host_device import HostDevice

ROOMS = 40


@pytest.mark.parametrize("record_inputs", [65536, 128])
def test_what_a_live_fleet_did_is_clean_and_happens_again(
    record_inputs: int,
    make_fleet: Any,
    model: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With few inputs kept, the recordings begin at a later checkpoint."""
    monkeypatch.setattr(recording, "BUDGET_NS", 1_000_000_000)  # a busy machine must not make a gap here
    wide = model(heads=4, k_dim=128, v_dim=128, page_size=8, pages=700, layers=2)
    fleet = make_fleet(
        "nixl", model=wide, path="staged", chunk_tokens=32, staging_ring_mb=1, record_inputs=record_inputs
    )
    fleet.start()
    rooms = [fleet.receive(fleet.room(1000 + number, 16, aux=number)) for number in range(ROOMS)]
    for number, room in enumerate(rooms):
        fleet.claim(room)
        if number % 5 == 4:
            next(iter(room.receives.values())).abort("enough")
        fleet.feed(room, (3, 9))
    for number, room in enumerate(rooms):
        ended = room.wait()
        assert ended <= {RoomState.SUCCESS, RoomState.FAILED}
        assert number % 5 == 4 or ended == {RoomState.SUCCESS}
    fleet.settle()

    path = tmp_path / "fleet.kvrec"
    assert run(["record", str(path)]) == 0
    capsys.readouterr()
    assert run(["replay", str(path), "-o", "json"]) == 0
    verdicts = json.loads(capsys.readouterr().out)["data"]
    assert sorted(verdict["agent"] for verdict in verdicts) == ["decode-0", "prefill-0", "prefill-1"]
    late = [note for verdict in verdicts for note in verdict["notes"]]
    assert all(note.startswith("the recording begins at input") for note in late), late
    assert bool(late) == (record_inputs == 128)
    for verdict in verdicts:
        assert verdict["breach"] is None
        assert (verdict["missed"], verdict["dropped"]) == (0, 0)
        assert verdict["inputs"] > 60
        if record_inputs > 128:
            assert verdict["rooms"] == ROOMS


@pytest.mark.parametrize("path", ["staged", "direct"])
@pytest.mark.parametrize("record_inputs", [65536, 64])
def test_so_it_is_with_devices_that_fail(
    path: str,
    record_inputs: int,
    make_fleet: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forwards that end late or fail, and copies that fail on either side."""
    monkeypatch.setattr(recording, "BUDGET_NS", 1_000_000_000)
    devices = {"prefill": HostDevice(), "decode": HostDevice()}
    fleet = make_fleet("loopback", device=devices, path=path, record_inputs=record_inputs).start()
    for number in range(1, 13):
        room = fleet.claim(fleet.receive(fleet.room(number, 6, aux=number)))
        devices["decode" if path == "staged" and number % 4 == 2 else "prefill"].fail_next = (
            number % 2 == 0 and path == "staged"
        )
        for place, send in enumerate(room.sends):
            event = devices["prefill"].engine_event(slow=5)
            if number % 4 == 3 and place == 1:
                event.failure = DeviceError("an illegal address was met")
            send.prefetch()
            send.pages(room.src, last=True, event=event)
            send.finish(aux_index=room.aux)
        ended = room.wait()
        assert ended in ({RoomState.SUCCESS}, {RoomState.FAILED})
        for device in devices.values():
            device.fail_next = 0
        if ended == {RoomState.FAILED}:
            fleet.recycle(room)
    fleet.settle()
    fleet.errors()
    recorded = tmp_path / "fleet.kvrec"
    assert run(["record", str(recorded)]) == 0
    capsys.readouterr()
    assert run(["replay", str(recorded), "-o", "json"]) == 0
    verdicts = json.loads(capsys.readouterr().out)["data"]
    assert len(verdicts) == 3
    for verdict in verdicts:
        assert verdict["breach"] is None
        assert (verdict["missed"], verdict["dropped"]) == (0, 0)
        assert all(note.startswith("the recording begins at input") for note in verdict["notes"]), verdict["notes"]
