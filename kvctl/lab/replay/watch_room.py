"""One room on a decode rank as it follows from its opening and from what arrives; coverage is planned anew here."""

from __future__ import annotations

from kvctl_agent.contract.values import layer_range
from kvctl_agent.layout.chunks import Chunk
from kvctl_agent.layout.plan import aux_writer, slices_to_reader, state_slices_to_reader, writer_cells
from kvctl_agent.layout.plan_inputs import PlanInputs
from kvctl_agent.layout.transfer_slice import TransferSlice
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.tag import PartKey, PartKind

_Final = tuple[PartKind, PartKey]


class RoomInvariants:
    """One room under one nonce, from its opening on."""

    __slots__ = (
        "accepted",
        "acked",
        "cells",
        "done",
        "drained",
        "failed",
        "finals",
        "in_place",
        "opening",
        "released",
        "scattering",
        "shares",
        "wanted",
        "writers",
    )

    def __init__(self, opening: ev.OpenRoom) -> None:
        self.opening = opening
        self.writers: tuple[str, ...] = ()  # the ranks it was opened at, in the order of unique ranks
        self.accepted: set[str] = set()
        self.drained: set[str] = set()
        self.acked: set[str] = set()
        self.cells: dict[tuple[int, int], Chunk] = {}
        self.shares: dict[int, list[TransferSlice]] = {}
        self.wanted: dict[tuple[int, int], int] = {}  # by writer and chunk, a bit for each layer
        self.in_place: dict[tuple[int, int], int] = {}
        self.finals: set[_Final] = set()  # that have not come
        self.scattering: set[int] = set()
        self.failed = self.done = self.released = False

    def plan(self, inputs: PlanInputs, reader: int) -> None:
        """What is owed to it."""
        opening, room = self.opening, self.opening.room
        for share in () if opening.prefill_only else slices_to_reader(inputs, room, reader):
            self.shares.setdefault(share.writer, []).append(share)
            for cell in writer_cells(inputs, room, share.writer, opening.total_pages, opening.prefix_pages):
                at = share.writer, cell.index
                self.cells[at] = cell
                self.wanted[at] = self.wanted.get(at, 0) | _bits(share.layer_lo, share.layer_hi)
        if opening.aux_index >= 0:
            self.finals.add((PartKind.AUX, PartKey(aux_writer(inputs, room, reader), 0, 0, 0)))
        components = [segment.index for segment in inputs.segments if segment.state]
        asked = {index for index, items in zip(components, opening.states, strict=False) if len(items)}
        for share in state_slices_to_reader(inputs, room, reader) if asked else ():
            if share.segment in asked:
                key = PartKey(share.writer, share.segment, share.layer_lo, share.layer_hi)
                self.finals.add((PartKind.STATE, key))

    def pages(self, key: PartKey) -> ev.Pages | None:
        """This rank's pages of a part; None where no such part is planned."""
        cell = self.cells.get((key.writer, key.chunk))
        if cell is None or not any(s.layer_lo <= key.lo < key.hi <= s.layer_hi for s in self.shares[key.writer]):
            return None
        first = cell.first - self.opening.prefix_pages
        return self.opening.pages[first : first + cell.count]

    def put(self, key: PartKey) -> None:
        """A part is in its pages."""
        at = key.writer, key.chunk
        self.in_place[at] = self.in_place.get(at, 0) | _bits(key.lo, key.hi)

    def gap(self) -> str:
        """What is not in its pages yet, in words; empty when nothing."""
        if not self.writers:
            return "it was opened at no rank"
        for (writer, chunk), wanted in self.wanted.items():
            if missing := wanted & ~self.in_place.get((writer, chunk), 0):
                lo, hi = (missing & -missing).bit_length() - 1, missing.bit_length()
                return f"writer {writer} chunk {chunk} layers {layer_range(lo, hi)} are not in their pages"
        for kind, key in sorted(self.finals):
            return f"{'the aux row' if kind is PartKind.AUX else 'state'} of writer {key.writer} has not come"
        if silent := [name for name in self.writers if name not in self.accepted]:
            return f"{silent[0]} has not accepted it"
        if self.scattering:
            return f"serial {min(self.scattering)} is still being scattered"
        return ""


def _bits(lo: int, hi: int) -> int:
    return (1 << hi) - (1 << lo)
