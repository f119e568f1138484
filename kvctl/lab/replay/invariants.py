"""Invariants of the protocol: their names, and what the plan of a room lets each of its ranks do.

The plan is computed from the plan inputs and from the calls and messages that open a room, never read from a machine.
Replays and the simulated worlds of the tests check the same objects. A replay knows the inputs and actions of one rank,
so it adds what a rank's messages prove (`decode_invariants`, `prefill_invariants`); a simulation knows all ranks, and
adds which writes are in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvctl_agent.contract.states import RoomState
from kvctl_agent.contract.values import layer_range
from kvctl_agent.errors import RemoteProtocolError
from kvctl_agent.layout.chunks import Chunk
from kvctl_agent.layout.page_indices import single, unpacked
from kvctl_agent.layout.plan import (
    TransferSlice,
    aux_writer,
    slices_to_reader,
    state_slices_to_reader,
    writer_cells,
)
from kvctl_agent.layout.plan_inputs import PlanInputs
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.decode.rooms import TablePages, mask
from kvctl_agent.protocol.tag import PartKey, PartKind, Tag

INVARIANTS: dict[str, str] = {
    "exception": "a machine raises nothing but LocalProtocolError, whatever its input",
    "two-owners": "no byte of the ring that may be written has two live owners",
    "serial-reused": "a serial identifies one grant and is never used again",
    "bad-grant": "a grant lies within the ring and belongs to an open room",
    "watermark-back": "the watermark never moves back",
    "gated-by-nobody": "a grant from an empty ring may be written at once",
    "scatter": "a part is scattered once, to its own pages, and only after its bytes landed in its granted region",
    "success-with-a-gap": "Success only when every planned byte is in its pages and its prefill ranks have accepted",
    "state-after-end": "a finished room never changes its state",
    "released-early": "pages are released once, and only when nothing can write or read them any more",
    "left-behind": "no state of a room remains once every rank has finished with it",
    "transfer-unasked": "a part is sent only to a decode rank that opened the room, and only as planned",
    "transfer-after-end": "no part is sent after its room has failed, was released, or was reported as drained",
    "transfer-ungranted": "a staged part is sent only into a region that is granted and not revoked",
    "transfer-gated": "a staged part is sent only when the watermark has passed its region",
    "transfer-without-lease": "a part is sent only to a peer that was heard from recently",
    "transfer-twice": "a part is sent once",
    "drained-in-flight": "drained and revoked are reported only when nothing of the room or region is in flight",
}

PartId = tuple[PartKind, PartKey]


class Violation(AssertionError):
    """Raised when an invariant does not hold.

    Attributes:
        invariant: a key of `INVARIANTS`.
        room: number of the room that the violation concerns; None if there is none.
    """

    def __init__(self, invariant: str, text: str, room: int | None = None) -> None:
        assert invariant in INVARIANTS
        super().__init__(text)
        self.invariant = invariant
        self.room = room


class PlannedPart(NamedTuple):
    """A part that the plan names.

    Attributes:
        share: its transfer slice; None for the aux row.
        pages: its pages, items of a state component, or row of aux at the decode rank.
        chunk: its pages of the prompt; None for a final part.
    """

    share: TransferSlice | None
    pages: ev.Pages
    chunk: Chunk | None = None


class RoomPlan:
    """All parts of a room that are sent to one decode rank.

    Args:
        reader: unique rank of the decode rank.
        tables: its page tables; the first is that of KV, the others those of KV groups.
        aux_index: its row of aux; -1 for none.
        states: its items of each state component; empty if they are not wanted.

    Attributes:
        layers: a bit for each layer that is sent, by (writer, chunk).
        finals: the final parts.
    """

    def __init__(
        self,
        inputs: PlanInputs,
        room: int,
        reader: int,
        tables: Sequence[TablePages],
        aux_index: int,
        states: Sequence[ev.Pages],
        *,
        prefill_only: bool,
    ) -> None:
        self.layers: dict[tuple[int, int], int] = {}
        self.finals: dict[PartId, PlannedPart] = {}
        self._tables = tables
        self._chunks: list[tuple[TransferSlice, dict[int, Chunk]]] = []
        for share in () if prefill_only else slices_to_reader(inputs, room, reader):
            table, writer = tables[share.table], share.writer
            cells = writer_cells(inputs, room, writer, reader, table.total_pages, table.prefix_pages, share.table)
            self._chunks.append((share, {cell.index: cell for cell in cells}))
            for cell in cells:
                place = writer, cell.index
                self.layers[place] = self.layers.get(place, 0) | mask(share.layer_lo, share.layer_hi)
        if aux_index >= 0:
            key = PartKey(aux_writer(inputs, room, reader), 0, 0, 0)
            self.finals[PartKind.AUX, key] = PlannedPart(None, single(aux_index))
        components = [segment.index for segment in inputs.segments if segment.state]
        items = {segment: pages for segment, pages in zip(components, states, strict=False) if len(pages)}
        for share in state_slices_to_reader(inputs, room, reader):
            if share.segment in items:
                key = PartKey(share.writer, share.segment, share.layer_lo, share.layer_hi)
                self.finals[PartKind.STATE, key] = PlannedPart(share, items[share.segment])

    @classmethod
    def of_call(cls, inputs: PlanInputs, call: ev.OpenRoom, reader: int) -> RoomPlan:
        """Returns the plan of a room that the decode engine opens."""
        tables = [
            TablePages(call.pages, inputs.decode_split, *inputs.span(call.prefix_pages, call.total_pages, call.tokens))
        ]
        for group, pages in zip(inputs.shape.groups, call.groups, strict=False):
            total = -(-call.tokens // group.page_size)
            tables.append(TablePages(pages, 1, total - len(pages), total))
        rest = call.aux_index, call.states
        return cls(inputs, call.room, reader, tables, *rest, prefill_only=call.prefill_only)

    @classmethod
    def of_message(cls, inputs: PlanInputs, message: msg.RoomOpen, reader: int) -> RoomPlan:
        """Returns the plan of a room that a decode rank opens at a prefill rank."""
        span = message.prefix_pages, message.total_pages
        tables = [TablePages(unpacked(message.pages), inputs.decode_split, *span)]
        for place, group in enumerate(inputs.shape.groups):
            pages = unpacked(message.groups[place] if place < len(message.groups) else b"")
            total = -(-message.tokens // group.page_size)
            tables.append(TablePages(pages, 1, total - len(pages), total))
        states = list(map(unpacked, message.states))
        return cls(inputs, message.room, reader, tables, message.aux_index, states, prefill_only=message.prefill_only)

    def find(self, kind: PartKind, key: PartKey) -> PlannedPart | None:
        """Returns the planned part with this key; None if there is none."""
        if kind is not PartKind.KV:
            return self.finals.get((kind, key))
        for share, chunks in self._chunks:
            chunk = chunks.get(key.chunk) if share.writer == key.writer else None
            if chunk is not None and share.layer_lo <= key.lo < key.hi <= share.layer_hi:
                table = self._tables[share.table]
                return PlannedPart(share, chunk.target(table.pages, table.split, table.prefix_pages), chunk)
        return None

    def owed(self, writer: int) -> dict[int, int]:
        """Returns the layers that one prefill rank sends, a bit for each, by chunk."""
        return {chunk: layers for (rank, chunk), layers in self.layers.items() if rank == writer}


@dataclass(slots=True, eq=False)
class ExpectedRoom:
    """A room at one decode rank under one nonce: which of its parts are in place, and how it has ended.

    Attributes:
        plan: None before the room is planned.
        covered: layers that are in their pages, as `RoomPlan.layers`.
        finals: final parts that have arrived.
        released: the engine has its pages back.
    """

    room: int
    nonce: int
    plan: RoomPlan | None = None
    state: RoomState = RoomState.BOOTSTRAPPING
    covered: dict[tuple[int, int], int] = field(default_factory=dict)
    finals: set[PartId] = field(default_factory=set)
    released: bool = False

    def cover(self, kind: PartKind, key: PartKey) -> bool:
        """Records that a part is in its pages; returns False if some of it was there before."""
        if kind is not PartKind.KV:
            new = (kind, key) not in self.finals
            self.finals.add((kind, key))
            return new
        place, layers = (key.writer, key.chunk), mask(key.lo, key.hi)
        before = self.covered.get(place, 0)
        self.covered[place] = before | layers
        return not before & layers

    def gap(self) -> str:
        """Returns which planned part is not in its pages, such as missing layers; "" if all are."""
        if self.plan is None:
            return "it was opened at no rank"
        for (writer, chunk), planned in self.plan.layers.items():
            if missing := planned & ~self.covered.get((writer, chunk), 0):
                lo, hi = (missing & -missing).bit_length() - 1, missing.bit_length()
                return f"writer {writer} chunk {chunk} layers {layer_range(lo, hi)} are not in their pages"
        for kind, key in sorted(self.plan.finals.keys() - self.finals):
            return f"{'the aux row' if kind is PartKind.AUX else 'state'} of writer {key.writer} has not arrived"
        return ""

    def change(self, state: RoomState) -> None:
        """Checks and records the state that the engine is told.

        Raises:
            Violation: the room has ended, or succeeds with a gap.
        """
        if self.state.finished:
            text = f"room {self.room} has finished as {self.state.label} and becomes {state.label}"
            raise Violation("state-after-end", text, self.room)
        if state is RoomState.SUCCESS and (gap := self.gap()):
            raise Violation("success-with-a-gap", f"room {self.room} succeeds, but {gap}", self.room)
        self.state = state

    def release(self) -> None:
        """Checks and records that the engine gets its pages back.

        Raises:
            Violation: it has them already, or the room has not ended.
        """
        if self.released:
            raise Violation("released-early", f"room {self.room} is released twice", self.room)
        if not self.state.finished:
            raise Violation("released-early", f"room {self.room} is released before it has finished", self.room)
        self.released = True


@dataclass(slots=True, eq=False)
class ExpectedTransfer:
    """The parts of a room that one prefill rank has sent to one decode rank.

    Attributes:
        sent: layers of KV, a bit for each, by chunk.
        finals: final parts.
    """

    sent: dict[int, int] = field(default_factory=dict)
    finals: set[PartId] = field(default_factory=set)

    def order(self, writer: int, order: ev.Transfer, plan: RoomPlan | None, *, finished: bool) -> None:
        """Checks and records an order to write a part.

        Args:
            writer: unique rank of the prefill rank.
            plan: that of the room at the decode rank; None if it is unknown.
            finished: the engine has finished the room.

        Raises:
            Violation: the part is not the planned one, was sent before, or is a final part that is sent too early.
        """

        def violation(invariant: str, text: str) -> Violation:
            name = f"{order.kind.name} {order.key} of room {order.room} to {order.peer}"
            return Violation(invariant, f"{name} {text}", order.room)

        try:
            tag = Tag.unpack(order.tag)
        except RemoteProtocolError as error:
            raise violation("transfer-unasked", f"is sent without a valid tag: {error}") from None
        expected = order.kind, order.room, order.nonce, order.grant.serial if order.grant else 0, order.key
        if (tag.kind, tag.room, tag.nonce, tag.serial, tag.key) != expected:
            raise violation("transfer-unasked", f"is sent with the tag of another part: {tag}")
        if len(order.src_pages) != len(order.dst_pages):
            raise violation("transfer-unasked", f"puts {len(order.src_pages)} pages into {len(order.dst_pages)}")
        if plan is not None:
            planned = plan.find(order.kind, order.key)
            if planned is None or order.key.writer != writer or planned.share != order.share:
                raise violation("transfer-unasked", f"is sent as {order.share}, which is not planned")
            if not np.array_equal(planned.pages, order.dst_pages):
                raise violation("transfer-unasked", "is sent to the pages of another part")
        chunk, layers = order.key.chunk, mask(order.key.lo, order.key.hi)
        if order.kind is PartKind.KV:
            before = self.sent.get(chunk, 0)
            if before & layers:
                raise violation("transfer-twice", "is sent although some of its layers were sent before")
            self.sent[chunk] = before | layers
            return
        if (order.kind, order.key) in self.finals:
            raise violation("transfer-twice", "is sent twice")
        if not finished:
            raise violation("transfer-unasked", "is sent before the engine has finished the room")
        if plan is not None and self.sent != plan.owed(writer):
            raise violation("transfer-unasked", "is sent before all KV parts")
        self.finals.add((order.kind, order.key))

    def undo(self, kind: PartKind, key: PartKey) -> None:
        """Records that an ordered part was dropped: it may be sent again."""
        self.finals.discard((kind, key))
        if kind is PartKind.KV and key.chunk in self.sent:
            self.sent[key.chunk] &= ~mask(key.lo, key.hi)
