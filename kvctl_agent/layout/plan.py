"""The plan as data: which writer owes which heads and layers of which segment to which decode rank.

Both sides compute it from the same `PlanInputs`. How layers are grouped and which path a part takes is the writer's
choice at run time and is no part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import lcm

from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.chunks import Chunk
from kvctl_agent.layout.context_parallel import chosen_cp, owned_cells
from kvctl_agent.layout.heads import mix64, replicas
from kvctl_agent.layout.local_shard import segment_heads, stage_layers
from kvctl_agent.layout.parallel import ParallelConfig, RankCoord
from kvctl_agent.layout.plan_inputs import PLAN_VERSION, Factor, PlanInputs
from kvctl_agent.layout.shape import Segment
from kvctl_agent.layout.transfer_slice import TransferSlice

Shares = tuple[TransferSlice, ...]


@dataclass(frozen=True, slots=True)
class _RoomPlan:
    """`kv` holds the shares of KV and draft by reader, then by segment; the rest is asked for once or more per room."""

    kv: Shares
    by_writer: Mapping[int, Shares]
    to_reader: Mapping[int, Shares]
    states_to_reader: Mapping[int, Shares]
    aux_candidates: Mapping[int, tuple[int, ...]]


def prefill_dp(inputs: PlanInputs, room: int) -> int:
    """The prefill dp rank that computes a room: room % dp, as SGLang routes by `bootstrap_room`."""
    return room % inputs.prefill.dp


def transfer_slices(inputs: PlanInputs, room: int, decode_dp: int) -> Shares:
    """All KV owed for a room that goes to `decode_dp`, ordered by reader, segment, layer, cp rank and head.

    A writer and a decode rank share the intersection of their heads and of their layers. Among writers that hold the
    same head, number (mix64(room) + reader) % replicas writes, so rooms and ranks spread over them. Decode ranks that
    hold the same head each get their own copy. Where cp ranks share a room, each has the same heads and layers here,
    and `writer_cells` says which pages.

    Raises:
        LayoutError: no such decode dp rank, or inputs of another plan version.
    """
    return _plan_of(inputs, room, decode_dp).kv


def slices_of_writer(inputs: PlanInputs, room: int, decode_dp: int, writer: int) -> Shares:
    """The KV that one prefill rank owes for a room; empty for a rank that owes nothing.

    Raises:
        LayoutError: no such rank.
    """
    owed = _plan_of(inputs, room, decode_dp).by_writer.get(writer)
    if owed is None:
        _place(inputs.prefill, writer)
    return owed or ()


def slices_to_reader(inputs: PlanInputs, room: int, reader: int) -> Shares:
    """The KV that one decode rank of the room's dp group is owed.

    Raises:
        LayoutError: no such rank.
    """
    return _plan_of(inputs, room, _place(inputs.decode, reader).dp).to_reader[reader]


def state_slices_to_reader(inputs: PlanInputs, room: int, reader: int) -> Shares:
    """The per-request state that one decode rank is owed, one share per (component, stage, writer); cp rank 0 sends it.

    Raises:
        LayoutError: no such rank.
    """
    return _plan_of(inputs, room, _place(inputs.decode, reader).dp).states_to_reader[reader]


def aux_writer(inputs: PlanInputs, room: int, reader: int) -> int:
    """The one prefill rank that writes a decode rank's aux row.

    It is elected among the ranks of the last pipeline stage and cp 0 whose tp siblings owe this decode rank KV.

    Raises:
        LayoutError: no such decode rank.
    """
    candidates = _plan_of(inputs, room, _place(inputs.decode, reader).dp).aux_candidates[reader]
    return candidates[(mix64(room) + reader) % len(candidates)]


def writer_cells(inputs: PlanInputs, room: int, writer: int, total_pages: int, prefix_pages: int) -> tuple[Chunk, ...]:
    """The grid's cells, narrowed to the pages that this writer's cp rank sends; cells without any are absent.

    Raises:
        LayoutError: no such rank, or a prefix longer than the prompt.
    """
    side = inputs.prefill
    rank = _place(side, writer).cp
    return owned_cells(inputs.cp_mode, side.cp, rank, room, total_pages, prefix_pages, inputs.chunk_pages)


@lru_cache(maxsize=4096)
def _place(side: ParallelConfig, rank: int) -> RankCoord:
    return side.coord(rank)


@lru_cache(maxsize=64)
def _spread(inputs: PlanInputs) -> int:
    """Segments of different heads have different numbers of replicas; a remainder by all at once serves each."""
    return lcm(*(replicas(segment.heads, inputs.prefill.tp) for segment in inputs.segments))


def _plan_of(inputs: PlanInputs, room: int, decode_dp: int) -> _RoomPlan:
    # A room changes nothing but who computed it and which replica and cp rank write: a handful of plans serve them all.
    spread = _spread(inputs)
    choice = mix64(room) % spread if spread > 1 else 0
    cp = chosen_cp(inputs.cp_mode, inputs.prefill.cp, room)
    return _plan(inputs, prefill_dp(inputs, room), decode_dp, choice, cp)


@lru_cache(maxsize=1024)
def _plan(inputs: PlanInputs, prefill_dp: int, decode_dp: int, choice: int, cp: int | None) -> _RoomPlan:
    if inputs.plan_version != PLAN_VERSION:
        raise LayoutError(f"{Factor('plan_version', PLAN_VERSION, inputs.plan_version)}: no plan for another version")
    prefill, decode = inputs.prefill, inputs.decode
    kv: list[TransferSlice] = []
    by_writer: dict[int, list[TransferSlice]] = {}
    to_reader: dict[int, Shares] = {}
    states_to_reader: dict[int, Shares] = {}
    aux_candidates: dict[int, tuple[int, ...]] = {}
    for stage in range(decode.pp):
        for tp in range(decode.tp):
            at = RankCoord(dp=decode_dp, pp=stage, cp=0, tp=tp)
            reader = decode.unique_rank(at)
            owed: list[TransferSlice] = []
            states: list[TransferSlice] = []
            for segment in inputs.segments:
                senders = (0,) if segment.state else range(prefill.cp) if cp is None else (cp,)
                found = _segment_shares(inputs, segment, prefill_dp, at, choice, tuple(senders))
                (states if segment.state else owed).extend(found)
            kv += owed
            to_reader[reader], states_to_reader[reader] = tuple(owed), tuple(states)
            for share in owed:
                by_writer.setdefault(share.writer, []).append(share)
            # In the order of heads, each once: stages and cp ranks have the same.
            tps = dict.fromkeys(prefill.coord(share.writer).tp for share in owed if share.segment == 0)
            last = [RankCoord(dp=prefill_dp, pp=prefill.pp - 1, cp=0, tp=writer_tp) for writer_tp in tps]
            aux_candidates[reader] = tuple(map(prefill.unique_rank, last))
    by_writer_all = {writer: tuple(owed) for writer, owed in by_writer.items()}
    return _RoomPlan(tuple(kv), by_writer_all, to_reader, states_to_reader, aux_candidates)


def _segment_shares(
    inputs: PlanInputs, segment: Segment, prefill_dp: int, at: RankCoord, choice: int, senders: tuple[int, ...]
) -> Iterator[TransferSlice]:
    """What the decode rank `at` is owed of one segment, by every prefill stage and each of the cp ranks `senders`."""
    prefill, decode = inputs.prefill, inputs.decode
    reader = decode.unique_rank(at)
    want = segment_heads(segment, decode.tp, at.tp)
    want_lo, want_hi = stage_layers(segment, inputs.shape, decode, at.pp)
    copies = replicas(segment.heads, prefill.tp)
    each = max(1, segment.heads // prefill.tp)
    for stage in range(prefill.pp):
        have_lo, have_hi = stage_layers(segment, inputs.shape, prefill, stage)
        layer_lo, layer_hi = max(want_lo, have_lo), min(want_hi, have_hi)
        if layer_lo >= layer_hi:
            continue
        for cp in senders:
            # Blocks of equal heads tile [0, H) on the prefill side; each is held by `copies` neighbouring tp ranks.
            for block in range(want.lo // each, (want.hi - 1) // each + 1):
                tp = block * copies + (choice + reader) % copies
                have = segment_heads(segment, prefill.tp, tp)
                lo, hi = max(have.lo, want.lo), min(have.hi, want.hi)
                yield TransferSlice(
                    writer=prefill.unique_rank(RankCoord(dp=prefill_dp, pp=stage, cp=cp, tp=tp)),
                    reader=reader,
                    segment=segment.index,
                    src_head=lo - have.lo,
                    dst_head=lo - want.lo,
                    heads=hi - lo,
                    layer_lo=layer_lo,
                    layer_hi=layer_hi,
                    src_pool_heads=have.hi - have.lo,
                    dst_pool_heads=want.hi - want.lo,
                    page_head_bytes=segment.page_head_bytes,
                )
