"""What a machine knows of its rooms beyond their records: whom each waits for, and what has not arrived from whom.

Runs on the admin thread beside the control loop, so it copies each mapping in one step before it walks it.
"""

from __future__ import annotations

from kvctl_agent.contract.snapshots import RoomRow
from kvctl_agent.contract.states import RoomState
from kvctl_agent.protocol.decode import DecodeMachine
from kvctl_agent.protocol.machine import Machine
from kvctl_agent.protocol.prefill import PrefillMachine
from kvctl_agent.protocol.recv_room import RecvRoom
from kvctl_agent.protocol.send_room import SendRoom


def add_evidence(machine: Machine, row: RoomRow) -> None:
    """Fill in what only the machine knows of an active room."""
    number, nonce = int(row["room"]), int(row["nonce"])
    if isinstance(machine, DecodeMachine):
        room = machine.rooms.get(number)
        if room is not None and room.nonce == nonce:
            row["owed"] = _owed(room)
            row["missing"] = _unheard(machine, room, row["owed"])
    elif isinstance(machine, PrefillMachine):
        sending = machine.rooms.get(number)
        if sending is not None and sending.record.nonce == nonce:
            row["missing"] = _unended(sending)


def _unheard(machine: DecodeMachine, room: RecvRoom, owed: dict[str, int]) -> list[str]:
    """The prefill ranks whose next word ends the state that a room is in."""
    legs = room.legs.copy()
    if not legs and room.failure is None:  # it is not opened before all of its instance is there
        return [name for name in machine.roster(room.instance) if not machine.is_ready(name)]
    if room.failure is not None:
        return [name for name, leg in legs.items() if not leg.drained]
    if room.state is RoomState.BOOTSTRAPPING:
        return [name for name, leg in legs.items() if not leg.accepted]
    if room.state is RoomState.SUCCESS:
        return [name for name, leg in legs.items() if not leg.acked]
    finals = {room.writers[key.writer] for _, key in room.finals.copy()}
    return [name for name in legs if name in owed or name in finals]


def _owed(room: RecvRoom) -> dict[str, int]:
    """Cells that have not landed, by writer."""
    landed = room.landed.copy()
    owed: dict[str, int] = {}
    for cell, wanted in room.wanted.copy().items():
        if cells := (wanted & ~landed.get(cell, 0)).bit_count():
            name = room.writers[cell[0]]
            owed[name] = owed.get(name, 0) + cells
    return owed


def _unended(room: SendRoom) -> list[str]:
    """The decode ranks that have not said how a room ended, once all of it is sent or it has failed."""
    legs = room.legs.copy()
    if room.failure is not None:
        return [name for name, leg in legs.items() if not leg.failed_acked]
    return [name for name, leg in legs.items() if not leg.done] if room.released else []
