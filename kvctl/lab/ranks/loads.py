"""Resolves one point of a sweep: its rooms, where each is computed and decoded, and the lots that fit in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from kvctl.lab.ranks import workload
from kvctl.lab.ranks.bench_messages import Load, PlannedLoad, PlannedRoom, PlanRequest, Request
from kvctl.lab.ranks.sizing import Budget, check_room_fits, pool_bytes, rooms_that_fit
from kvctl.lab.ranks.transfer_volume import TransferVolume


@dataclass(frozen=True, slots=True)
class Needs:
    """What one load needs of every rank.

    Attributes:
        load: the load, cut into lots.
        longest: (tokens, cached tokens) of its longest room.
        reader_bytes: staged bytes of the largest room at one decode rank.
        window: most rooms in flight at one decode rank.
        notes: what people should know.
    """

    load: PlannedLoad
    longest: tuple[int, int]
    reader_bytes: int
    window: int
    notes: tuple[str, ...]

    @property
    def lot_rooms(self) -> int:
        """Rooms of the largest lot."""
        return max(end - first for first, end in self.load["lots"])


def resolve_load(request: PlanRequest, mover: TransferVolume, load: Load, budget: Budget) -> Needs:
    """One point of a sweep.

    Raises:
        LayoutError: not even one room fits.
    """
    return _of_requests(request, mover, load, budget) if request.requests else _drawn(request, mover, load, budget)


def prefill_groups(mover: TransferVolume) -> int:
    """A position in a lot, by this modulus, decides the dp group within any prefill instance."""
    return lcm(*(inputs.prefill.dp for inputs in mover.inputs))


def segment_items(mover: TransferVolume, needs: Sequence[Needs], instance: int, role: str) -> list[list[int]]:
    """Pages (of a state: items) of each segment that the pools of each dp group's ranks need, for every load."""
    inputs = mover.inputs[max(0, instance)]
    groups = (inputs.prefill if role == "prefill" else inputs.decode).dp
    most: list[list[int]] = []
    for need in needs:
        rooms = need.load["rooms"]
        items = [mover.items(room["tokens"]) for room in rooms]
        if role == "prefill":
            starts = [first for first, end in need.load["lots"] for _ in range(first, end)]
            mine = [
                (index - starts[index]) % groups if room["instance"] == instance else -1
                for index, room in enumerate(rooms)
            ]
        else:
            mine = [room["decode_dp"] for room in rooms]
        lots = [(first, end) for first, end in need.load["lots"]]
        held = [
            workload.most_held([each[segment] for each in items], lots, mine, groups)
            for segment in range(len(inputs.segments))
        ]
        most = [[max(pair) for pair in zip(*both, strict=True)] for both in zip(most or held, held, strict=True)]
    return most


def _drawn(request: PlanRequest, mover: TransferVolume, load: Load, budget: Budget) -> Needs:
    """Rooms of drawn lengths, closed-loop or at a rate."""
    page_size, decode_dp = request.page_size, request.decode.dp
    most = rooms_that_fit(budget, mover, load)
    mean = max(1, round(workload.mean_tokens(load.tokens)))
    mean_bytes = mover.room_bytes(0, mean, 0).payload
    count = load.rooms or request.rooms or workload.default_rooms(mean_bytes, min(load.concurrency, most))
    lot = workload.fit_batch(load.concurrency, count, mean_bytes, most, decode_dp)
    lots = workload.cut(count, lot.rooms)
    active = workload.active_groups(lot.in_flight, decode_dp)
    tokens = workload.draw_tokens(load.tokens, count, request.seed)
    arrivals = workload.draw_arrivals(request.rate, count, request.seed) if request.rate else None
    asked = [
        Request(
            arrival_ms=None if arrivals is None else arrivals[index] - arrivals[first],
            tokens=length,
            prefix_tokens=workload.prefix_tokens(length, page_size, request.prefix_hit),
            output_tokens=request.output_tokens,
            decode_dp=workload.decode_group(index - first, active),
        )
        for first, end in lots
        for index, length in enumerate(tokens[first:end], first)
    ]
    notes = []
    if lot.in_flight < min(load.concurrency, count):
        limited = f"rooms in flight limited to {lot.in_flight} by memory{budget.detail}"
        notes.append(f"concurrency {load.concurrency}: {limited}")
    elif count < load.concurrency:
        notes.append(f"concurrency {load.concurrency}: only {count} rooms to run")
    windows = workload.windows(lot.in_flight, decode_dp)
    return _needs(mover, load, asked, lots, windows, load.tokens.text, notes)


def _of_requests(request: PlanRequest, mover: TransferVolume, load: Load, budget: Budget) -> Needs:
    """The requests given, in lots of their real sizes: a trace's few long prompts must not make every lot small."""
    asked = list(request.requests[: load.rooms or request.rooms])
    check_room_fits(budget, mover, max(each.tokens for each in asked))
    every = range(len(mover.inputs))
    sizes = {tokens: max(pool_bytes(mover, at, tokens) for at in every) for tokens in {each.tokens for each in asked}}
    lots = workload.cut_to_fit([sizes[each.tokens] for each in asked], budget.pool_bytes)
    placed = _placed(asked, lots, request.decode.dp)
    in_flight = min(load.concurrency, max(end - first for first, end in lots))
    notes = []
    if len(lots) > 1:
        notes.append(
            f"{len(asked)} requests run in {len(lots)} lots, because memory does not hold all at once{budget.detail}; "
            f"arrivals start anew in each"
        )
    groups, sessions = [each.decode_dp for each in placed], [each.session for each in placed]
    each_group = -(-in_flight // workload.active_groups(in_flight, request.decode.dp))
    windows = workload.group_windows(each_group, groups, sessions, request.decode.dp)
    lengths = sorted(each.tokens for each in asked)
    text = f"{lengths[0]}..{lengths[-1]}" if lengths[0] < lengths[-1] else str(lengths[0])
    return _needs(mover, load, placed, lots, windows, text, notes)


def _placed(asked: Sequence[Request], lots: Sequence[tuple[int, int]], decode_dp: int) -> list[Request]:
    """The requests with a decode dp group each, arrivals counted from the first of their lot."""
    placed = []
    for first, end in lots:
        start_ms = min((each.arrival_ms for each in asked[first:end] if each.arrival_ms is not None), default=0.0)
        for position, each in enumerate(asked[first:end]):
            group = workload.decode_group(each.session if each.session >= 0 else position, decode_dp)
            placed.append(
                Request(
                    arrival_ms=None if each.arrival_ms is None else each.arrival_ms - start_ms,
                    tokens=each.tokens,
                    prefix_tokens=each.prefix_tokens,
                    output_tokens=each.output_tokens,
                    session=each.session,
                    decode_dp=each.decode_dp if each.decode_dp >= 0 else group,
                )
            )
    return placed


def _needs(
    mover: TransferVolume,
    load: Load,
    asked: Sequence[Request],
    lots: Sequence[tuple[int, int]],
    windows: list[int],
    text: str,
    notes: Sequence[str],
) -> Needs:
    groups, instances = prefill_groups(mover), len(mover.inputs)
    rooms = []
    for first, end in lots:
        for position, each in enumerate(asked[first:end]):
            instance = workload.prefill_instance(position, groups, instances, mover.inputs[0].decode.dp)
            rooms.append(
                PlannedRoom(
                    tokens=each.tokens,
                    prefix_tokens=each.prefix_tokens,
                    instance=instance,
                    decode_dp=each.decode_dp,
                    bytes=mover.room_bytes(instance, each.tokens, each.prefix_tokens).payload,
                    arrival_ms=each.arrival_ms,
                    output_tokens=each.output_tokens,
                    session=each.session,
                )
            )
    planned = PlannedLoad(
        concurrency=load.concurrency,
        in_flight=sum(windows),
        windows=windows,
        tokens=text,
        tokens_mean=sum(each.tokens for each in asked) / len(asked),
        rooms=rooms,
        lots=[list(lot) for lot in lots],
    )
    kinds = {(room["instance"], room["tokens"], room["prefix_tokens"]) for room in rooms}
    return Needs(
        load=planned,
        longest=max((tokens, prefix) for _, tokens, prefix in kinds),
        reader_bytes=max(mover.room_bytes(*kind).reader_staging for kind in kinds),
        window=max(windows),
        notes=tuple(notes),
    )
