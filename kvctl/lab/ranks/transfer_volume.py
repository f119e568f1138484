"""Calculates the pages and bytes that each writer has to send to each decode rank for a room, from the layout's plan.

The results size pools and rings and are shown to the user; the ranks do not use them to transfer data.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from kvctl.lab.ranks.geometry import state_items
from kvctl.lab.ranks.plan import PlannedShape
from kvctl_agent.layout.chunks import page_count
from kvctl_agent.layout.parallel import RankCoord
from kvctl_agent.layout.plan import TransferSlice, state_slices_to_reader, transfer_slices, writer_cells
from kvctl_agent.layout.plan_inputs import PlanInputs


class OwedParts(NamedTuple):
    """The parts of one segment that one writer has to send to one decode rank for a room.

    Attributes:
        share: layers and heads that the writer sends.
        parts: number of pages, or state items, of each part.
    """

    share: TransferSlice
    parts: tuple[int, ...]

    @property
    def payload_bytes(self) -> int:
        return sum(map(self.share.payload_bytes, self.parts))


class RoomBytes(NamedTuple):
    """Bytes that one room transfers.

    Attributes:
        payload: bytes received by all decode ranks together, in whole pages.
        reader_staging: bytes that pass through the staging ring of the decode rank that receives the most.
    """

    payload: int
    reader_staging: int


class TransferVolume:
    """Calculates the transfer volume of rooms of one model, for each prefill instance.

    Attributes:
        inputs: layout inputs of each pair of a prefill instance and the decode instance, all for the same model and
            page size.
    """

    def __init__(self, inputs: Sequence[PlanInputs], shape: PlannedShape) -> None:
        self.inputs = tuple(inputs)
        self._states = shape["states"]
        self._page_size = inputs[0].page_size
        self.room_bytes = cache(self._room_bytes)

    def items(self, tokens: int) -> tuple[int, ...]:
        """Returns the number of pages, or of state items, of each segment in a room of `tokens`."""
        pages = page_count(tokens, self._page_size)
        paged = len(self.inputs[0].segments) - len(self._states)
        return (*[pages] * paged, *(state_items(state, tokens, self._page_size) for state in self._states))

    def owed(
        self, instance: int, tokens: int, prefix_tokens: int, room: int = 0, decode_dp: int = 0
    ) -> list[OwedParts]:
        """Returns all parts of a room, grouped by writer, decode rank and segment.

        Args:
            instance: prefill instance that computes the room.
            prefix_tokens: length of the prefix that the decode side has cached.
            room: number of the room, which determines the prefill dp group.
            decode_dp: dp group of the decode instance.

        Raises:
            LayoutError: the prefix is longer than the prompt, or there is no such decode dp group.
        """
        inputs = self.inputs[instance]
        items = self.items(tokens)
        cached = prefix_tokens // self._page_size
        found = []
        for share in transfer_slices(inputs, room, decode_dp):
            cells = writer_cells(inputs, room, share.writer, share.reader, items[0], cached)
            if cells:
                found.append(OwedParts(share, tuple(cell.count for cell in cells)))
        side = inputs.decode
        for coord in (RankCoord(decode_dp, pp, 0, tp) for pp in range(side.pp) for tp in range(side.tp)):
            states = state_slices_to_reader(inputs, room, side.unique_rank(coord))
            found += [OwedParts(share, (items[share.segment],)) for share in states]
        return found

    def _room_bytes(self, instance: int, tokens: int, prefix_tokens: int) -> RoomBytes:
        staging: dict[int, int] = {}
        payload = 0
        for owed in self.owed(instance, tokens, prefix_tokens):
            payload += owed.payload_bytes
            staged = sum(map(owed.share.part_bytes, owed.parts))
            staging[owed.share.reader] = staging.get(owed.share.reader, 0) + staged
        return RoomBytes(payload, max(staging.values(), default=0))

    def largest_part(self, instance: int, tokens: int, prefix_tokens: int) -> tuple[int, str]:
        """Returns the bytes of a room's largest part if layers are not grouped, and how they are calculated as text."""
        most, arithmetic = 0, ""
        for share, parts in self.owed(instance, tokens, prefix_tokens):
            pages = max(parts)
            if share.part_bytes(pages) > most:
                most = share.part_bytes(pages)
                segment = self.inputs[instance].segments[share.segment]
                items = f"{pages} items" if segment.state else f"{pages} pages of {self._page_size} tokens"
                arithmetic = (
                    f"{share.num_layers} layers x {items} x {share.heads} heads x "
                    f"{share.page_head_bytes} B of {segment.name}"
                )
        return most, arithmetic
