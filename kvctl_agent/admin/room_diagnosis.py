"""What a machine knows of its rooms beyond their records: whom each waits for, and what has not arrived from whom.

Runs on the admin thread beside the control loop, so it copies each mapping in one step before it walks it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from kvctl_agent.contract.snapshots import OwedParts, RoomRow
from kvctl_agent.contract.states import RoomState
from kvctl_agent.protocol.decode import DecodeMachine
from kvctl_agent.protocol.decode.rooms import RecvRoom
from kvctl_agent.protocol.machine import Machine
from kvctl_agent.protocol.prefill import PrefillMachine
from kvctl_agent.protocol.prefill.send_room import Part, PartState, PeerTransfer, SendRoom, Wait

_WRITE = "its write to end"


def add_diagnosis(machine: Machine, row: RoomRow) -> None:
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


def owed_parts(machine: Machine, row: RoomRow) -> list[OwedParts]:
    """Which parts of an active room are still owed, and by a writer's word what they wait for; none once it failed."""
    number, nonce = int(row["room"]), int(row["nonce"])
    if isinstance(machine, DecodeMachine):
        room = machine.rooms.get(number)
        return _not_arrived(machine, room) if room and room.nonce == nonce and room.failure is None else []
    sending = machine.rooms.get(number) if isinstance(machine, PrefillMachine) else None
    if not isinstance(machine, PrefillMachine) or sending is None or sending.record.nonce != nonce or sending.failure:
        return []
    return [owed for leg in sending.legs.copy().values() for owed in _not_sent(machine, sending, leg)]


def _not_arrived(machine: DecodeMachine, room: RecvRoom) -> list[OwedParts]:
    """By writer."""
    landed, finals = room.landed.copy(), room.finals.copy()
    cells: dict[str, list[tuple[int, int]]] = {}  # chunk and bits of layers
    for (writer, chunk), wanted in room.wanted.copy().items():
        if missing := wanted & ~landed.get((writer, chunk), 0):
            cells.setdefault(room.writers[writer], []).append((chunk, missing))
    final_names = [room.writers[key.writer] for _, key in finals]
    age_ns = max(0, time.monotonic_ns() - room.since_ns)
    return [
        _parts_row(name, machine.local.name, cells.get(name, ()), final_names.count(name), "", age_ns)
        for name in dict.fromkeys([*cells, *final_names])
    ]


def _not_sent(machine: PrefillMachine, room: SendRoom, leg: PeerTransfer) -> list[OwedParts]:
    """Towards one decode rank, by what they wait for."""
    now = time.monotonic_ns()
    cells: dict[str, list[tuple[int, int]]] = {}
    since: dict[str, int] = {}
    finals: dict[str, int] = {}

    def add(waits_for: str, since_ns: int, missing: Iterable[tuple[int, int]] = (), final_parts: int = 0) -> None:
        cells.setdefault(waits_for, []).extend(missing)
        since[waits_for] = min(since_ns, since.get(waits_for, since_ns))
        finals[waits_for] = finals.get(waits_for, 0) + final_parts

    parts = list(leg.parts.values())
    cut: dict[int, int] = {}
    for part in parts:
        bits = (1 << part.key.hi) - (1 << part.key.lo)
        cut[part.key.chunk] = cut.get(part.key.chunk, 0) | bits
        if part.state is PartState.PLANNED:
            add(_pages_wait_for(room), room.since_ns, [(part.key.chunk, bits)])
        elif part.state is not PartState.SENT:
            add(_part_waits_for(machine, leg, part), part.ready_ns, [(part.key.chunk, bits)])
    planned = sum((1 << share.layer_hi) - (1 << share.layer_lo) for share in leg.shares)
    for cell in leg.cells:
        if missing := planned & ~cut.get(cell.index, 0):
            add(_pages_wait_for(room), room.since_ns, [(cell.index, missing)])
    for final in list(leg.finals.values()):
        if final.state is PartState.QUEUED:
            add(_WRITE, room.since_ns, final_parts=1)
        elif final.state is PartState.PLANNED:
            waits = f"a sign of life from {leg.peer}" if room.finished and not leg.to_queue else _pages_wait_for(room)
            add("its KV parts to be sent" if leg.to_queue and room.finished else waits, room.since_ns, final_parts=1)
    name = machine.local.name
    return [
        _parts_row(name, leg.peer, cells[waits_for], finals[waits_for], waits_for, max(0, now - since[waits_for]))
        for waits_for in cells
    ]


def _pages_wait_for(room: SendRoom) -> str:
    """Why pages are not ready."""
    if not room.claimed:
        return "its engine to begin the room"
    if room.launched:
        return "the event of its forward"
    if room.held:
        return "finish(): until then this stage keeps its pages back (pp_early_send is off)"
    return "finish()" if room.ledger.complete else "its pages from the engine"


def _part_waits_for(machine: PrefillMachine, leg: PeerTransfer, part: Part) -> str:
    """What keeps a part back whose pages are ready."""
    match machine.waits_for(leg, part):
        case Wait.WRITE:
            return _WRITE
        case Wait.GRANT:
            return f"a grant of {leg.peer}'s ring" if part.asks else "its turn to ask for a grant"
        case Wait.WATERMARK:
            return f"the watermark of {leg.peer}'s ring"
    return f"a sign of life from {leg.peer}"


def _parts_row(
    writer: str, decode: str, cells: Iterable[tuple[int, int]], finals: int, waits_for: str, age_ns: int
) -> OwedParts:
    """Of cells as chunk and bits of layers."""
    known = list(cells)
    chunks, layers = [chunk for chunk, _ in known], 0
    for _, bits in known:
        layers |= bits
    return {
        "writer": writer,
        "decode": decode,
        "cells": sum(bits.bit_count() for _, bits in known),
        "chunks": [min(chunks), max(chunks) + 1] if chunks else [],
        "layers": [(layers & -layers).bit_length() - 1, layers.bit_length()] if layers else [],
        "finals": finals,
        "waits_for": waits_for,
        "age_ns": age_ns,
    }
