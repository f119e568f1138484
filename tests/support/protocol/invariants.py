"""What the plan of a room lets each of its ranks do.

The plan is computed from the plan inputs and from the calls that open a room, never read from a machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kvctl_agent.contract.states import RoomState
from kvctl_agent.contract.values import layer_range
from kvctl_agent.errors import RemoteProtocolError
from kvctl_agent.layout.chunks import Chunk
from kvctl_agent.layout.page_indices import single
from kvctl_agent.layout.plan import (
    TransferSlice,
    aux_writer,
    slices_to_reader,
    state_slices_to_reader,
    writer_cells,
)
from kvctl_agent.layout.plan_inputs import PlanInputs
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.decode.rooms import TablePages, mask
from kvctl_agent.protocol.tag import PartKey, PartKind, Tag, aux_key

PartId = tuple[PartKind, PartKey]


class Broken(AssertionError):
    """Error for a step that the protocol must not take."""


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
        reader: name of the decode rank.
        opening: the call by which its engine opened the room.
        instance: number of the prefill instance.
        plan: None before the room is planned.
        covered: layers that are in their pages, as `RoomPlan.layers`.
        finals: final parts that have arrived.
        released: the engine has its pages back.
    """

    room: int
    nonce: int
    reader: str
    opening: ev.OpenRoom
    instance: int = 0
    plan: RoomPlan | None = None
    state: RoomState = RoomState.BOOTSTRAPPING
    covered: dict[tuple[int, int], int] = field(default_factory=dict)
    finals: set[PartId] = field(default_factory=set)
    released: bool = False
    failure: Any = None

    @property
    def aux_written(self) -> bool:
        """Whether the aux row has been written."""
        return any(kind is PartKind.AUX for kind, _ in self.finals)

    @property
    def segments(self) -> set[int]:
        """Segments of the model of which a part is in place."""
        assert self.plan is not None or not self.covered
        layers = [
            PartKey(*place, layer, layer + 1)
            for place, bits in self.covered.items()
            for layer in range(bits.bit_length())
            if bits >> layer & 1
        ]
        parts = [self.plan.find(PartKind.KV, key) for key in layers] if self.plan is not None else []
        states = {key.chunk for kind, key in self.finals if kind is PartKind.STATE}
        return states | {part.share.segment for part in parts if part is not None and part.share is not None}

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
            Broken: the room has ended, or succeeds with a gap.
        """
        if self.state.finished:
            text = f"room {self.room} has finished as {self.state.label} and becomes {state.label}"
            raise Broken(text)
        if state is RoomState.SUCCESS and (gap := self.gap()):
            raise Broken(f"room {self.room} succeeds, but {gap}")
        self.state = state

    def release(self) -> None:
        """Checks and records that the engine gets its pages back.

        Raises:
            Broken: it has them already, or the room has not ended.
        """
        if self.released:
            raise Broken(f"room {self.room} is released twice")
        if not self.state.finished:
            raise Broken(f"room {self.room} is released before it has finished")
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
            Broken: the part is not the planned one, was sent before, or is a final part that is sent too early.
        """

        def broken(text: str) -> Broken:
            return Broken(f"{order.kind.name} {order.key} of room {order.room} to {order.peer} {text}")

        try:
            tag = Tag.unpack(order.tag)
        except RemoteProtocolError as error:
            raise broken(f"is sent without a valid tag: {error}") from None
        expected = order.kind, order.room, order.nonce, order.grant.serial if order.grant else 0, order.key
        if (tag.kind, tag.room, tag.nonce, tag.serial, tag.key) != expected:
            raise broken(f"is sent with the tag of another part: {tag}")
        if len(order.src_pages) != len(order.dst_pages):
            raise broken(f"puts {len(order.src_pages)} pages into {len(order.dst_pages)}")
        if plan is not None:
            planned = plan.find(order.kind, order.key)
            if planned is None or order.key.writer != writer or planned.share != order.share:
                raise broken(f"is sent as {order.share}, which is not planned")
            if not np.array_equal(planned.pages, order.dst_pages):
                raise broken("is sent to the pages of another part")
        chunk, layers = order.key.chunk, mask(order.key.lo, order.key.hi)
        if order.kind is PartKind.KV:
            before = self.sent.get(chunk, 0)
            if before & layers:
                raise broken("is sent although some of its layers were sent before")
            self.sent[chunk] = before | layers
        final = _final_of(order)
        if final is None:
            return
        if final in self.finals:
            raise broken("is sent twice")
        if not finished:
            raise broken("is sent before the engine has finished the room")
        if plan is not None and self.sent != plan.owed(writer):
            raise broken("is sent before all KV parts")
        self.finals.add(final)

    def undo(self, order: ev.Transfer) -> None:
        """Records that an ordered part was dropped: it may be sent again."""
        self.finals.discard(_final_of(order))
        if order.kind is PartKind.KV and order.key.chunk in self.sent:
            self.sent[order.key.chunk] &= ~mask(order.key.lo, order.key.hi)


def _final_of(order: ev.Transfer) -> PartId | None:
    """Returns the final part that an order sends: itself, or the aux row in the tag of a KV part."""
    if order.kind is not PartKind.KV:
        return order.kind, order.key
    return (PartKind.AUX, aux_key(order.key.writer)) if order.aux_row >= 0 else None
