"""Calculates the pages and bytes that each writer has to send to each decode rank for a room, from the layout's plan.

The results size pools and rings and are shown to the user; the ranks do not use them to transfer data.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

from kvctl.lab.ranks.geometry import group_pages, state_items
from kvctl.lab.ranks.plan import PlannedShape
from kvctl.lab.ranks.request import Role
from kvctl_agent.layout.chunks import page_count
from kvctl_agent.layout.parallel import ParallelConfig, RankCoord, local_shards
from kvctl_agent.layout.plan import TransferSlice, state_slices_to_reader, transfer_slices, writer_cells
from kvctl_agent.layout.plan_inputs import PlanInputs
from kvctl_agent.layout.shape import Segment
from kvctl_agent.memory.addresses import SegmentAddresses
from kvctl_agent.memory.pool_layouts import place_segment
from kvctl_agent.paths.contiguous_runs import PlaneRuns, segment_runs


class OwedParts(NamedTuple):
    """The parts of one segment that one writer has to send to one decode rank for a room.

    Attributes:
        parts: number of transfer pages, pages of a KV group, or state items, of each part.
    """

    share: TransferSlice
    parts: tuple[int, ...]

    @property
    def payload_bytes(self) -> int:
        return sum(map(self.share.payload_bytes, self.parts))


class RoomBytes(NamedTuple):
    """Bytes that one room transfers.

    Attributes:
        payload: bytes received by all decode ranks together, in whole transfer pages.
        reader_staging: bytes that pass through the staging ring of the decode rank that receives the most.
    """

    payload: int
    reader_staging: int


class TransferVolume:
    """Calculates the transfer volume of rooms of one model, for each prefill instance.

    Attributes:
        inputs: layout inputs of each pair of a prefill instance and the decode instance, all for the same model and
            page sizes.
    """

    def __init__(
        self, inputs: Sequence[PlanInputs], shape: PlannedShape, kv_layouts: tuple[str, str] = ("nhd", "nhd")
    ) -> None:
        self.inputs = tuple(inputs)
        self._groups, self._states = shape["groups"], shape["states"]
        self._kv_layouts = kv_layouts
        self.room_bytes = cache(self._room_bytes)
        self.runs = cache(self._runs)

    def page_size(self, role: Role) -> int:
        """Returns the tokens per page of a side's pools."""
        first = self.inputs[0]
        return first.page_size * (first.prefill_split if role == "prefill" else first.decode_split)

    def items(self, tokens: int, role: Role) -> tuple[int, ...]:
        """Returns the pages, or state items, of each segment that a room of `tokens` has on each rank of a side."""
        shared_by = self.inputs[0].decode.cp if role == "decode" else 1
        pages = page_count(tokens, self.page_size(role) * shared_by)
        groups = [len(group_pages(group, tokens)) for group in self._groups]
        states = [state_items(state, tokens, self.page_size("prefill")) for state in self._states]
        shared = len(self.inputs[0].segments) - len(groups) - len(states)
        return (*[pages] * shared, *groups, *states)

    def owed(
        self, instance: int, tokens: int, prefix_tokens: int, room: int = 0, decode_dp: int = 0
    ) -> list[OwedParts]:
        """Returns all parts of a room, grouped by writer, decode rank and segment.

        Args:
            prefix_tokens: length of the prefix that the decode side has cached.
            room: number of the room, which determines the prefill dp group.

        Raises:
            LayoutError: the prefix is longer than the prompt, or there is no such decode dp group.
        """
        inputs = self.inputs[instance]
        tables = [range(prefix_tokens // inputs.page_size, page_count(tokens, inputs.page_size))]
        tables += [group_pages(group, tokens, prefix_tokens) for group in self._groups]
        found = []
        for share in transfer_slices(inputs, room, decode_dp):
            pages = tables[share.table]
            cells = writer_cells(inputs, room, share.writer, share.reader, pages.stop, pages.start, share.table)
            if cells:
                found.append(OwedParts(share, tuple(cell.count for cell in cells)))
        side, items = inputs.decode, self.items(tokens, "decode")
        for place in product(range(side.pp), range(side.cp), range(side.tp)):
            states = state_slices_to_reader(inputs, room, side.unique_rank(RankCoord(decode_dp, *place)))
            found += [OwedParts(share, (items[share.segment],)) for share in states]
        return found

    def _runs(self, instance: int, share: TransferSlice) -> tuple[PlaneRuns, ...]:
        """Returns the runs of bytes of a transfer page that are contiguous in both pools, for each plane."""
        inputs = self.inputs[instance]
        return segment_runs(
            self._addresses(inputs, inputs.prefill, share.writer, share.segment, "prefill"),
            self._addresses(inputs, inputs.decode, share.reader, share.segment, "decode"),
            share.heads,
        )

    def _addresses(
        self, inputs: PlanInputs, side: ParallelConfig, rank: int, segment: int, role: Role
    ) -> SegmentAddresses:
        """Returns the strides of a rank's pool in transfer pages; the pool has no addresses yet."""
        at = side.coord(rank)
        shard, transfer = (
            local_shards(inputs.shape, page_size, side, at)[segment]
            for page_size in (self.page_size(role), inputs.page_size)
        )
        strides = place_segment(shard, 1, self._kv_layouts[role == "decode"]).strides
        split = self.page_size(role) // inputs.page_size if shard.segment.table == 0 else 1
        return SegmentAddresses(shard, 1, (), strides).at(transfer, split)

    def page_tokens(self, segment: Segment) -> int:
        """Returns the tokens of each page of a segment that is transferred; 0 for state."""
        if segment.table is None:
            return 0
        return self._groups[segment.table - 1]["page_size"] if segment.table else self.inputs[0].page_size

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
                tokens_each = self.page_tokens(segment)
                items = f"{pages} pages of {tokens_each} tokens" if tokens_each else f"{pages} items"
                arithmetic = (
                    f"{share.num_layers} layers x {items} x {share.heads} heads x "
                    f"{share.page_head_bytes} B of {segment.name}"
                )
        return most, arithmetic
