"""Computes the transfer plan: which heads and layers of a segment each writer sends to each decode rank.

Both sides compute the plan from the same `PlanInputs`. Layer grouping and the path of a part are chosen by the writer
at run time and are not part of the plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import lcm

from kvctl_agent.errors import LayoutError, LocalProtocolError
from kvctl_agent.layout.chunks import WHOLE, Chunk, Stripe
from kvctl_agent.layout.context_parallel import owned_cells, sole_cp_sender
from kvctl_agent.layout.parallel import ParallelConfig, RankCoord, head_range, mix64, replicas, stage_layers
from kvctl_agent.layout.plan_inputs import PLAN_VERSION, Factor, PlanInputs
from kvctl_agent.layout.shape import Segment

STAGING_ALIGN_BYTES = 256
"""Alignment of a part's size in the staging ring."""


@dataclass(frozen=True, slots=True)
class TransferSlice:
    """The heads and layers of one segment that one writer sends to one decode rank, in every chunk of a room.

    Attributes:
        writer: Prefill rank (unique rank).
        reader: Decode rank (unique rank).
        segment: Index of the segment in the model's segments.
        src_head: First head, as an index into the heads of the writer's pool.
        dst_head: First head, as an index into the heads of the decode rank's pool.
        heads: Number of heads.
        layer_lo: First layer, in the segment's numbering, which is global for KV and draft.
        layer_hi: End of the layers, exclusive.
        src_pool_heads: Heads in one row of the writer's pool; the source stride.
        dst_pool_heads: Heads in one row of the decode rank's pool; the destination stride.
        page_head_bytes: Bytes of one head of one transfer page (for state: one item) in one layer.
        src_split, dst_split: Transfer pages in a page of the writer's and of the decode rank's pool.
        table: Page table of the segment; 0 for state.
    """

    writer: int
    reader: int
    segment: int
    src_head: int
    dst_head: int
    heads: int
    layer_lo: int
    layer_hi: int
    src_pool_heads: int
    dst_pool_heads: int
    page_head_bytes: int
    src_split: int = 1
    dst_split: int = 1
    table: int = 0

    @property
    def num_layers(self) -> int:
        """Number of layers in the slice."""
        return self.layer_hi - self.layer_lo

    @property
    def whole_rows(self) -> bool:
        """Whether both pools hold exactly these heads, so that whole transfer pages can be sent unchanged."""
        return self.heads == self.src_pool_heads == self.dst_pool_heads

    def payload_bytes(self, pages: int, layers: int | None = None) -> int:
        """Returns the bytes of a part of this slice with `pages` pages and `layers` layers (None: all layers)."""
        return (self.num_layers if layers is None else layers) * pages * self.heads * self.page_head_bytes

    def part_bytes(self, pages: int, layers: int | None = None) -> int:
        """Returns the bytes of a part in the staging ring: `payload_bytes` rounded up to `STAGING_ALIGN_BYTES`."""
        return -(-self.payload_bytes(pages, layers) // STAGING_ALIGN_BYTES) * STAGING_ALIGN_BYTES


TransferSlices = tuple[TransferSlice, ...]


@dataclass(frozen=True, slots=True)
class _RoomPlan:
    """The transfer slices of a room, indexed by writer and by reader.

    Attributes:
        kv: KV and draft slices, ordered by reader, then by segment.
        by_writer: KV and draft slices by writer.
        to_reader: KV and draft slices by reader.
        states_to_reader: Slices of per-request state by reader.
        aux_candidates: By reader, the writers that may be elected to write its aux row.
        keeper: The reader that every prefill rank that computes the room knows.
        opened_at: By reader, the prefill ranks at which it opens the room.
        readers: By prefill rank that computes the room, the readers to which it may write; the keeper if there is none.
    """

    kv: TransferSlices
    by_writer: Mapping[int, TransferSlices]
    to_reader: Mapping[int, TransferSlices]
    states_to_reader: Mapping[int, TransferSlices]
    aux_candidates: Mapping[int, tuple[int, ...]]
    keeper: int
    opened_at: Mapping[int, tuple[int, ...]]
    readers: Mapping[int, frozenset[int]]


def prefill_dp(prefill: ParallelConfig, room: int) -> int:
    """Returns the prefill dp rank that computes a room: room % dp, as SGLang routes by `bootstrap_room`."""
    return room % prefill.dp


def check_dp_group(prefill: ParallelConfig, coord: RankCoord, room: int, name: str) -> None:
    """Raises LocalProtocolError if another dp group than that of the prefill rank `name` has to compute a room."""
    wanted = prefill_dp(prefill, room)
    if wanted != coord.dp:
        raise LocalProtocolError(
            f"room {room} is computed by dp group {wanted} of this instance (its number % {prefill.dp}), and {name} "
            f"belongs to dp group {coord.dp}: route the request to a rank of that group"
        )


def prefill_ranks(inputs: PlanInputs, room: int) -> tuple[int, ...]:
    """Returns the prefill ranks that compute a room: all of its dp group."""
    return _ranks_of_dp(inputs.prefill, prefill_dp(inputs.prefill, room))


def transfer_slices(inputs: PlanInputs, room: int, decode_dp: int) -> TransferSlices:
    """Returns all KV slices of a room that decode dp rank `decode_dp` receives.

    They are ordered by reader, segment, layer, cp rank and head.

    A writer sends a decode rank the heads and layers that both hold. Among writers that hold the same head, the one
    with index (mix64(room) + reader) % replicas sends it, which spreads rooms and decode ranks over the replicas.
    Decode ranks that hold the same head each get their own copy. If cp ranks of either side share a room, their slices
    have the same heads and layers, and `writer_cells` returns the pages of each.

    Raises:
        LayoutError: the decode instance has no such dp rank, or the inputs have another plan version.
    """
    return _room_plan(inputs, room, decode_dp).kv


def slices_of_writer(inputs: PlanInputs, room: int, decode_dp: int, writer: int) -> TransferSlices:
    """Returns the KV slices that one prefill rank sends for a room; empty if it sends nothing.

    Raises:
        LayoutError: the prefill instance has no such rank.
    """
    slices = _room_plan(inputs, room, decode_dp).by_writer.get(writer)
    if slices is None:
        _coord(inputs.prefill, writer)
    return slices or ()


def slices_to_reader(inputs: PlanInputs, room: int, reader: int) -> TransferSlices:
    """Returns the KV slices that one decode rank of the room's dp group receives.

    Raises:
        LayoutError: the decode instance has no such rank.
    """
    return _room_plan(inputs, room, _coord(inputs.decode, reader).dp).to_reader[reader]


def state_slices_to_reader(inputs: PlanInputs, room: int, reader: int) -> TransferSlices:
    """Returns the slices of per-request state that one decode rank receives, one per (component, stage, writer).

    State is always sent by cp rank 0.

    Raises:
        LayoutError: the decode instance has no such rank.
    """
    return _room_plan(inputs, room, _coord(inputs.decode, reader).dp).states_to_reader[reader]


def aux_writer(inputs: PlanInputs, room: int, reader: int) -> int:
    """Returns the prefill rank that writes the aux row of a decode rank.

    Candidates are the ranks of the last pipeline stage that have cp rank 0 and the tp rank of a writer of KV to this
    decode rank. The hash of the room's number selects one of them.

    Raises:
        LayoutError: the decode instance has no such rank.
    """
    candidates = _room_plan(inputs, room, _coord(inputs.decode, reader).dp).aux_candidates[reader]
    return candidates[(mix64(room) + reader) % len(candidates)]


def keeper(inputs: PlanInputs, room: int, decode_dp: int) -> int:
    """Returns the decode rank that keeps a room together, chosen by the hash of the room's number.

    Every rank of the prefill dp group knows it, so that all ranks of the room are connected through it.

    Raises:
        LayoutError: the decode instance has no such dp rank.
    """
    return _room_plan(inputs, room, decode_dp).keeper


def opened_at(inputs: PlanInputs, room: int, reader: int) -> tuple[int, ...]:
    """Returns the prefill ranks at which a decode rank opens a room: those that may write to it.

    For the keeper all ranks of the dp group that computes the room: at those that only write to others it is known
    without opening the room.

    Raises:
        LayoutError: the decode instance has no such rank.
    """
    return _room_plan(inputs, room, _coord(inputs.decode, reader).dp).opened_at[reader]


def readers_of(inputs: PlanInputs, room: int, decode_dp: int, writer: int) -> frozenset[int]:
    """Returns the decode ranks that open a room at a prefill rank, except a keeper to which it writes nothing.

    These are the ranks to which it may write; if there are none, the keeper alone; and none if another dp group
    computes the room.

    Raises:
        LayoutError: an instance has no such rank.
    """
    readers = _room_plan(inputs, room, decode_dp).readers.get(writer)
    if readers is None:
        _coord(inputs.prefill, writer)
    return readers or frozenset()


def writer_cells(
    inputs: PlanInputs, room: int, writer: int, reader: int, total_pages: int, prefix_pages: int, table: int = 0
) -> tuple[Chunk, ...]:
    """Returns the chunks of a room that a writer sends to a decode rank; empty if it sends none.

    The chunks have only pages of the writer's cp rank and of the decode rank's stripe. Pages are those of a page table,
    and a chunk has the same number in all of them.

    Raises:
        LayoutError: an instance has no such rank, or the prefix is longer than the prompt.
    """
    side = inputs.prefill
    rank = _coord(side, writer).cp
    chunk_pages = inputs.chunk_pages_of(table)
    cells = owned_cells(inputs.cp_mode, side.cp, rank, room, total_pages, prefix_pages, chunk_pages)
    stripe = stripe_of(inputs, reader)
    return tuple(cell for each in cells if (cell := each.of_stripe(stripe)).count)


def stripe_of(inputs: PlanInputs, reader: int) -> Stripe:
    """Returns the pages of each prompt that a decode rank has.

    Raises:
        LayoutError: the decode instance has no such rank.
    """
    ranks = inputs.decode.cp
    return Stripe(inputs.stripe_pages, ranks, _coord(inputs.decode, reader).cp) if ranks > 1 else WHOLE


@lru_cache(maxsize=4096)
def _coord(side: ParallelConfig, rank: int) -> RankCoord:
    return side.coord(rank)


@lru_cache(maxsize=4096)
def _ranks_of_dp(side: ParallelConfig, dp: int) -> tuple[int, ...]:
    return tuple(rank for rank in range(side.size) if side.coord(rank).dp == dp)


@lru_cache(maxsize=64)
def _hash_period(inputs: PlanInputs) -> int:
    """Returns the number whose remainder of a room's hash chooses the replica in every segment, and the keeper."""
    readers = inputs.decode.pp * inputs.decode.cp * inputs.decode.tp
    return lcm(readers, *(replicas(segment.heads, inputs.prefill.tp) for segment in inputs.segments))


@lru_cache(maxsize=1024)
def _room_plan(inputs: PlanInputs, room: int, decode_dp: int) -> _RoomPlan:
    # Asked several times for each room. Rooms differ only in the prefill dp rank, the replica, the keeper and the cp
    # rank: few cached plans serve all.
    period = _hash_period(inputs)
    choice = mix64(room) % period if period > 1 else 0
    cp = sole_cp_sender(inputs.cp_mode, inputs.prefill.cp, room)
    return _plan(inputs, prefill_dp(inputs.prefill, room), decode_dp, choice, cp)


@lru_cache(maxsize=1024)
def _plan(inputs: PlanInputs, prefill_dp: int, decode_dp: int, choice: int, cp: int | None) -> _RoomPlan:
    if inputs.plan_version != PLAN_VERSION:
        raise LayoutError(f"{Factor('plan_version', PLAN_VERSION, inputs.plan_version)}: unsupported plan version")
    prefill, decode = inputs.prefill, inputs.decode
    kv: list[TransferSlice] = []
    by_writer: dict[int, list[TransferSlice]] = {}
    to_reader: dict[int, TransferSlices] = {}
    states_to_reader: dict[int, TransferSlices] = {}
    aux_candidates: dict[int, tuple[int, ...]] = {}
    opened_at: dict[int, tuple[int, ...]] = {}
    for stage, cp_rank, tp in itertools.product(range(decode.pp), range(decode.cp), range(decode.tp)):
        coord = RankCoord(dp=decode_dp, pp=stage, cp=cp_rank, tp=tp)
        reader = decode.unique_rank(coord)
        kv_slices: list[TransferSlice] = []
        state_slices: list[TransferSlice] = []
        for segment in inputs.segments:
            senders = (0,) if segment.state else range(prefill.cp) if cp is None else (cp,)
            slices = _segment_slices(inputs, segment, prefill_dp, coord, choice, tuple(senders))
            (state_slices if segment.state else kv_slices).extend(slices)
        kv += kv_slices
        to_reader[reader], states_to_reader[reader] = tuple(kv_slices), tuple(state_slices)
        for part_slice in kv_slices:
            by_writer.setdefault(part_slice.writer, []).append(part_slice)
        # The writers' tp ranks in head order, without the duplicates of other stages and cp ranks.
        tps = dict.fromkeys(prefill.coord(part_slice.writer).tp for part_slice in kv_slices if not part_slice.segment)
        last = [RankCoord(dp=prefill_dp, pp=prefill.pp - 1, cp=0, tp=writer_tp) for writer_tp in tps]
        aux_candidates[reader] = tuple(map(prefill.unique_rank, last))
        writers = {each.writer for each in (*kv_slices, *state_slices)}.union(aux_candidates[reader])
        opened_at[reader] = tuple(sorted(writers))
    slices_by_writer = {writer: tuple(slices) for writer, slices in by_writer.items()}
    ranks = _ranks_of_dp(prefill, prefill_dp)
    keeper = tuple(to_reader)[choice % len(to_reader)]
    written = {rank: frozenset(reader for reader, at in opened_at.items() if rank in at) for rank in ranks}
    readers = {rank: found or frozenset({keeper}) for rank, found in written.items()}
    opened_at[keeper] = ranks
    by_reader = to_reader, states_to_reader, aux_candidates
    return _RoomPlan(tuple(kv), slices_by_writer, *by_reader, keeper, opened_at, readers)


def _segment_slices(
    inputs: PlanInputs, segment: Segment, prefill_dp: int, coord: RankCoord, choice: int, senders: tuple[int, ...]
) -> Iterator[TransferSlice]:
    """Yields the slices of one segment that the decode rank at `coord` receives.

    Args:
        inputs: Inputs of the plan.
        segment: The segment.
        prefill_dp: Prefill dp rank that computes the room.
        coord: The decode rank.
        choice: Number that, with the decode rank, selects one of the tp ranks that hold the same heads if the tp sizes
            differ.
        senders: Prefill cp ranks that send the segment.
    """
    prefill, decode = inputs.prefill, inputs.decode
    reader = decode.unique_rank(coord)
    dst_heads = head_range(segment.heads, decode.tp, coord.tp)
    dst_lo, dst_hi = stage_layers(segment, inputs.shape, decode, coord.pp)
    copies = replicas(segment.heads, prefill.tp)
    block_heads = max(1, segment.heads // prefill.tp)
    for stage in range(prefill.pp):
        src_lo, src_hi = stage_layers(segment, inputs.shape, prefill, stage)
        layer_lo, layer_hi = max(dst_lo, src_lo), min(dst_hi, src_hi)
        if layer_lo >= layer_hi:
            continue
        for cp in senders:
            # Blocks of equal size tile the heads on the prefill side; `copies` neighbouring tp ranks hold each block.
            for block in range(dst_heads.lo // block_heads, (dst_heads.hi - 1) // block_heads + 1):
                # Between equal tp sizes each rank reads its own counterpart: engines may keep more beside replicated
                # heads, such as an aux row about this rank's KV alone.
                tp = coord.tp if prefill.tp == decode.tp else block * copies + (choice + reader) % copies
                src_heads = head_range(segment.heads, prefill.tp, tp)
                lo, hi = max(src_heads.lo, dst_heads.lo), min(src_heads.hi, dst_heads.hi)
                yield TransferSlice(
                    writer=prefill.unique_rank(RankCoord(dp=prefill_dp, pp=stage, cp=cp, tp=tp)),
                    reader=reader,
                    segment=segment.index,
                    src_head=lo - src_heads.lo,
                    dst_head=lo - dst_heads.lo,
                    heads=hi - lo,
                    layer_lo=layer_lo,
                    layer_hi=layer_hi,
                    src_pool_heads=src_heads.hi - src_heads.lo,
                    dst_pool_heads=dst_heads.hi - dst_heads.lo,
                    page_head_bytes=segment.page_head_bytes,
                    src_split=inputs.prefill_split if segment.table == 0 else 1,
                    dst_split=inputs.decode_split if segment.table == 0 else 1,
                    table=segment.table or 0,
                )
