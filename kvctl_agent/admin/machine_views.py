"""Read-only views of the protocol state machine for admin replies: staging ring, gated parts, and what rooms wait for.

The control loop publishes them in pieces, or a thread of the observer reads them while the control loop changes the
machine: they copy each mapping in one step before iterating over it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from kvctl_agent.contract.snapshots import GatedPart, OwedParts, RingAllocation, RingState, RingUse
from kvctl_agent.contract.states import RoomState
from kvctl_agent.observer.documents import Diagnosis
from kvctl_agent.protocol.decode import DecodeMachine
from kvctl_agent.protocol.decode.rooms import RecvRoom
from kvctl_agent.protocol.machine import Machine
from kvctl_agent.protocol.prefill import PrefillMachine
from kvctl_agent.protocol.prefill.send_room import Part, PartState, PeerTransfer, SendRoom, Wait
from kvctl_agent.protocol.ring import Allocation

GONE = "gone"


def ring_use(machine: Machine) -> RingUse | None:
    """Returns the size and use of a decode rank's staging ring; None if the rank has no ring."""
    if not isinstance(machine, DecodeMachine) or not machine.ring.size_bytes:
        return None
    ring = machine.ring
    return {
        "size_bytes": ring.size_bytes,
        "used_bytes": min(ring.used_bytes, ring.size_bytes),
        "high_water_bytes": ring.high_water_bytes,
        "live": len(machine.allocations()),
    }


def ring_state(machine: Machine) -> RingState | None:
    """Returns the state of a decode rank's staging ring; None if the rank has no ring."""
    if not isinstance(machine, DecodeMachine) or not machine.ring.size_bytes:
        return None
    ring = machine.ring
    return {
        "size_bytes": ring.size_bytes,
        "head_bytes": ring.head,
        "round": ring.round,
        "used_bytes": ring.used_bytes,
        "high_water_bytes": ring.high_water_bytes,
        "watermark": {"round": ring.watermark.round, "tail": ring.watermark.tail, "age_ns": 0},
        "refused_largest_bytes": machine.refused_largest_bytes or None,
    }


def allocations(machine: Machine) -> Iterator[RingAllocation]:
    """Yields the allocations of a decode rank's staging ring, oldest first; none without a ring."""
    if isinstance(machine, DecodeMachine):
        now = time.monotonic_ns()
        for allocation in machine.allocations():
            yield _allocation(machine, allocation, now)


def _allocation(machine: DecodeMachine, allocation: Allocation, now_ns: int) -> RingAllocation:
    region, key = allocation.region, allocation.key
    room = machine.rooms.get(allocation.room.room)
    known = room is not None and room.nonce == allocation.room.nonce
    return {
        "serial": region.serial,
        "room": str(allocation.room.room),
        "nonce": str(allocation.room.nonce),
        "writer": allocation.room.peer,
        "chunk": key.chunk,
        "layers": [key.lo, key.hi],
        "offset": region.offset,
        "end": region.end,
        "round": region.round,
        "age_ns": now_ns - allocation.granted_ns,
        "state": allocation.state.value,
        "posted": allocation.posted,
        "room_state": room.state.label if room is not None and known else GONE,
        "aside": machine.ring.is_retired(region.serial),
    }


def gated_count(machine: Machine) -> int:
    """Returns the number of gated parts of a prefill rank; 0 on a decode rank."""
    return len(machine.parked()) if isinstance(machine, PrefillMachine) else 0


def gated_parts(machine: Machine) -> Iterator[GatedPart]:
    """Yields the gated parts of a prefill rank, which are ready but may not be sent yet; none on a decode rank."""
    if isinstance(machine, PrefillMachine):
        now = time.monotonic_ns()
        for transfer, part in machine.parked():
            yield _gated(machine, transfer, part, now)


def _gated(machine: PrefillMachine, transfer: PeerTransfer, part: Part, now_ns: int) -> GatedPart:
    grant, asked_ns = part.grant, part.asked_ns
    waits = machine.waits_for(transfer, part).value
    if grant is not None and waits == Wait.WATERMARK.value:
        waits = f"{waits} round {grant.round - 1} tail {grant.end}"
    return {
        "room": str(transfer.room),
        "peer": transfer.peer,
        "chunk": part.key.chunk,
        "layers": [part.key.lo, part.key.hi],
        "bytes": part.nbytes,
        "waiting_for": waits,
        "age_ns": now_ns - part.ready_ns,
        "requests": part.asks,
        "asked_age_ns": now_ns - asked_ns if asked_ns else None,
    }


_WRITE = "its write to end"


def diagnoses(machine: Machine) -> Iterator[Diagnosis]:
    """Yields what the rooms wait for, those that have been in their state for the longest time first."""
    if isinstance(machine, DecodeMachine):
        for room in sorted(machine.rooms.values(), key=lambda room: room.since_ns):
            owed = _owed(room)
            yield {
                "room": str(room.room),
                "nonce": str(room.nonce),
                "missing": _awaited_prefill(machine, room, owed),
                "owed": owed,
                "owed_parts": _not_arrived(machine, room) if room.failure is None else [],
            }
    elif isinstance(machine, PrefillMachine):
        for sending in sorted(machine.rooms.values(), key=lambda room: room.since_ns):
            transfers = () if sending.failure else sending.transfers.copy().values()
            yield {
                "room": str(sending.room),
                "nonce": str(sending.record.nonce),
                "missing": _awaited_decode(sending),
                "owed": {},
                "owed_parts": [owed for transfer in transfers for owed in _not_sent(machine, sending, transfer)],
            }


def _awaited_prefill(machine: DecodeMachine, room: RecvRoom, owed: dict[str, int]) -> list[str]:
    """Returns the names of the prefill ranks whose messages a decode rank's room waits for in its current state."""
    transfers = room.transfers.copy()
    if not transfers and room.failure is None:  # the room is opened once all ranks that compute it are connected
        return [name for name in machine.ranks_of(room) if not machine.is_ready(name)]
    if room.failure is not None:
        return [name for name, transfer in transfers.items() if not transfer.drained]
    if room.state is RoomState.BOOTSTRAPPING:
        return [name for name, transfer in transfers.items() if not (transfer.accepted or transfer.kept)]
    if room.state is RoomState.SUCCESS:
        return sorted(room.awaited.copy()) or [name for name, transfer in transfers.items() if not transfer.acked]
    finals = {room.writers[key.writer] for _, key in room.finals.copy()}
    return [name for name in transfers if name in owed or name in finals]


def _owed(room: RecvRoom) -> dict[str, int]:
    """Returns the number of coverage cells that have not landed, by name of their writer."""
    landed = room.landed.copy()
    owed: dict[str, int] = {}
    for cell, wanted in room.wanted.copy().items():
        if cells := (wanted & ~landed.get(cell, 0)).bit_count():
            name = room.writers[cell[0]]
            owed[name] = owed.get(name, 0) + cells
    return owed


def _awaited_decode(room: SendRoom) -> list[str]:
    """Returns the names of the decode ranks that have not confirmed the end of a sent or failed room."""
    transfers = room.transfers.copy()
    if room.failure is not None:
        return [name for name, transfer in transfers.items() if not transfer.acked]
    return [name for name, transfer in transfers.items() if not transfer.done] if room.released else []


def _not_arrived(machine: DecodeMachine, room: RecvRoom) -> list[OwedParts]:
    """Returns one row for each writer whose parts a decode rank has not all received."""
    landed, finals = room.landed.copy(), room.finals.copy()
    cells: dict[str, list[tuple[int, int]]] = {}  # chunk and bit mask of layers
    for (writer, chunk), wanted in room.wanted.copy().items():
        if missing := wanted & ~landed.get((writer, chunk), 0):
            cells.setdefault(room.writers[writer], []).append((chunk, missing))
    final_names = [room.writers[key.writer] for _, key in finals]
    age_ns = max(0, time.monotonic_ns() - room.since_ns)
    return [
        _parts_row(name, machine.local.name, cells.get(name, ()), final_names.count(name), "", age_ns)
        for name in dict.fromkeys([*cells, *final_names])
    ]


def _not_sent(machine: PrefillMachine, room: SendRoom, transfer: PeerTransfer) -> list[OwedParts]:
    """Returns the parts not yet sent to one decode rank, one row for each event that parts wait for."""
    now = time.monotonic_ns()
    cells: dict[str, list[tuple[int, int]]] = {}
    since: dict[str, int] = {}
    finals: dict[str, int] = {}

    def add(waits_for: str, since_ns: int, missing: Iterable[tuple[int, int]] = (), final_parts: int = 0) -> None:
        cells.setdefault(waits_for, []).extend(missing)
        since[waits_for] = min(since_ns, since.get(waits_for, since_ns))
        finals[waits_for] = finals.get(waits_for, 0) + final_parts

    parts = list(transfer.parts.values())
    in_parts: dict[int, int] = {}  # by chunk: bit mask of the layers, of all page tables, for which a part exists
    for part in parts:
        bits = (1 << part.key.hi) - (1 << part.key.lo)
        in_parts[part.key.chunk] = in_parts.get(part.key.chunk, 0) | bits
        if part.state is PartState.PLANNED:
            add(_pages_wait_for(room), room.since_ns, [(part.key.chunk, bits)])
        elif part.state is not PartState.SENT:
            add(_part_waits_for(machine, transfer, part), part.ready_ns, [(part.key.chunk, bits)])
    for share in transfer.shares:
        planned = (1 << share.layer_hi) - (1 << share.layer_lo)
        for cell in transfer.tables[share.table].chunks:
            if missing := planned & ~in_parts.get(cell.index, 0):
                add(_pages_wait_for(room), room.since_ns, [(cell.index, missing)])
    for final in list(transfer.finals.values()):
        if final.state is PartState.QUEUED:
            add(_WRITE, room.since_ns, final_parts=1)
        elif final.state is PartState.PLANNED:
            if not room.finished:
                waits = _pages_wait_for(room)
            else:
                waits = "its KV parts to be sent" if transfer.to_queue else f"a sign of life from {transfer.peer}"
            add(waits, room.since_ns, final_parts=1)
    name = machine.local.name
    return [
        _parts_row(name, transfer.peer, cells[waits_for], finals[waits_for], waits_for, max(0, now - since[waits_for]))
        for waits_for in cells
    ]


def _pages_wait_for(room: SendRoom) -> str:
    """Returns the event, as text, that pages of a room wait for before they are ready to send."""
    if not room.claimed:
        return "its engine to begin the room"
    if room.launched:
        return "the event of its forward"
    if room.recalling:
        return "parts in transfer to end, whose pages its engine has recalled"
    if room.recalled and not room.deferred:
        return "its engine to pass the recalled pages again"
    if room.deferred:
        return "finish(): until then this pipeline stage holds its pages back (pp_early_send is off)"
    return "finish()" if room.computed.complete else "its pages from the engine"


def _part_waits_for(machine: PrefillMachine, transfer: PeerTransfer, part: Part) -> str:
    """Returns the event, as text, that a part with ready pages waits for before it is sent."""
    match machine.waits_for(transfer, part):
        case Wait.WRITE:
            return _WRITE
        case Wait.GRANT:
            return f"a grant of {transfer.peer}'s ring" if part.asks else "its turn to ask for a grant"
        case Wait.WATERMARK:
            return f"the watermark of {transfer.peer}'s ring"
    return f"a sign of life from {transfer.peer}"


def _parts_row(
    writer: str, decode: str, cells: Iterable[tuple[int, int]], finals: int, waits_for: str, age_ns: int
) -> OwedParts:
    """Builds one row of `owed_parts`.

    Args:
        writer, decode: agent names of the two ends.
        cells: missing cells, as pairs of a chunk index and a bit mask of layers.
        finals: number of missing final parts.
        waits_for: event that the parts wait for; "" if unknown.
        age_ns: how long they have waited.
    """
    cells = list(cells)
    chunks, layers = [chunk for chunk, _ in cells], 0
    for _, bits in cells:
        layers |= bits
    return {
        "writer": writer,
        "decode": decode,
        "cells": sum(bits.bit_count() for _, bits in cells),
        "chunks": [min(chunks), max(chunks) + 1] if chunks else [],
        "layers": [(layers & -layers).bit_length() - 1, layers.bit_length()] if layers else [],
        "finals": finals,
        "waits_for": waits_for,
        "age_ns": age_ns,
    }
