"""Goes through the settings that could be chosen, predicts each, and recommends one; says why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvctl.lab.tune.costs import Costs
from kvctl.lab.tune.model import Prediction, exposed_us, parts_of, predict, ring_bytes
from kvctl.lab.tune.room import Room

CHUNKS = (1024, 2048, 4096, 8192, 16384)
DEFAULT_CHUNK = 8192
_MIB = 1 << 20
_RING_STEP = 64 * _MIB
_NEAR = 1.03  # what is not this much better is not worth another setting
_NEW_PAGES = 1.1  # an engine with other pages is another matter
_GROUPS = range(1, 11)


@dataclass(frozen=True, slots=True)
class Workload:
    """What the rooms are like.

    Attributes:
        concurrency: rooms in flight at most.
        rate: rooms that arrive in a second; None: as soon as there is room.
        mean_tokens: of a prompt, without what decode has cached.
        layer_us: compute of one layer for one chunk; 0: not known.
        decode_groups: decode dp groups that share the load.
        layers: of the model.
    """

    concurrency: int
    rate: float | None
    mean_tokens: float
    layer_us: float
    decode_groups: int
    layers: int


@dataclass(frozen=True, slots=True)
class Option:
    """One way to set the fleet up, with what is to be expected of it.

    Attributes:
        ring_bytes: of each decode rank; 0 where nothing is staged.
        group_size: layers per group; 0: not pipelined.
        hidden_ratio: part of the transfer that its forward hides; None where compute is not known.
        why: what speaks for or against it.
    """

    path: str
    page_size: int
    chunk_tokens: int
    cp_mode: str
    ring_bytes: int
    group_size: int
    prediction: Prediction
    padded_ratio: float
    hidden_ratio: float | None = None
    recommended: bool = False
    why: str = ""

    @property
    def ring_mb(self) -> int:
        return -(-self.ring_bytes // _RING_STEP) * _RING_STEP // _MIB

    def settings(self) -> dict[str, str | int]:
        """As the agent's configuration has them."""
        found: dict[str, str | int] = {"path": self.path, "chunk_tokens": self.chunk_tokens}
        if self.ring_bytes:
            found["staging_ring_mb"] = self.ring_mb
        if self.cp_mode:
            found["cp_mode"] = self.cp_mode
        if self.group_size:
            found |= {"pipeline": "on", "pipeline_group_size": self.group_size}
        return found


def advise(rooms: Sequence[tuple[str, Room]], costs: Costs, load: Workload) -> list[Option]:
    """The best option of each path, page size and CP mode; the recommended one first.

    Args:
        rooms: CP mode ("" without context parallelism) and room, for every page size that can be chosen; the engine's
            own page size first.
    """
    options = [
        _best_chunk([_option(room, path, chunk, mode, costs, load) for chunk in CHUNKS])
        for mode, room in rooms
        for path in room.paths
    ]
    chosen = _choose(options)
    return [
        replace(each, recommended=each is chosen, why=_why(each, chosen))
        for each in sorted(options, key=lambda each: (each is not chosen, each.prediction.p50_us))
    ]


def _option(room: Room, path: str, chunk_tokens: int, cp_mode: str, costs: Costs, load: Workload) -> Option:
    share = min(1.0, load.mean_tokens / room.tokens)
    found = predict(room, path, chunk_tokens, costs, load.concurrency, load.rate, share)
    group_size, hidden = _grouping(room, found, chunk_tokens, costs, load)
    return Option(
        path=path,
        page_size=room.page_size,
        chunk_tokens=chunk_tokens,
        cp_mode=cp_mode,
        ring_bytes=ring_bytes(room, path, load.concurrency, load.decode_groups, chunk_tokens),
        group_size=group_size,
        prediction=found,
        padded_ratio=room.padded_bytes / room.nbytes if room.nbytes else 0.0,
        hidden_ratio=hidden,
    )


def _best_chunk(options: Sequence[Option]) -> Option:
    """The quickest; the default where it is about as quick, else the largest that is: fewer messages."""
    best = min(option.prediction.alone_us for option in options)
    near = [option for option in options if option.prediction.alone_us <= best * _NEAR]
    return next((option for option in near if option.chunk_tokens == DEFAULT_CHUNK), near[-1])


def _choose(options: Sequence[Option]) -> Option:
    """Throughput first, then latency; among those about as good the one that needs the least change: order decides."""

    def near(option: Option) -> float:
        return _NEAR if option.page_size == options[0].page_size else _NEAR / _NEW_PAGES

    most = max(option.prediction.rooms_per_s * near(option) for option in options)
    able = [option for option in options if option.prediction.rooms_per_s * near(option) * _NEAR >= most]
    quickest = min(option.prediction.p50_us / near(option) for option in able)
    return next(option for option in able if option.prediction.p50_us / near(option) <= quickest * _NEAR)


def _grouping(
    room: Room, found: Prediction, chunk_tokens: int, costs: Costs, load: Workload
) -> tuple[int, float | None]:
    """Layers per group, 0 where cutting the forward gains nothing; and how much of the transfer is hidden then."""
    if not load.layer_us or load.layers < 2:
        return 0, None
    compute = load.layer_us * load.layers * parts_of(room, chunk_tokens)
    transfer = found.alone_us
    by_groups = {n: exposed_us(compute, transfer, n, costs.lane.cost.us_per_write + costs.room_us / 4) for n in _GROUPS}
    groups = min(by_groups, key=lambda n: by_groups[n])
    if compute + by_groups[groups] > (compute + transfer) / _NEAR:
        return 0, 0.0
    return -(-load.layers // groups), max(0.0, 1 - by_groups[groups] / transfer)


def _why(option: Option, chosen: Option) -> str:
    mine, best = option.prediction, chosen.prediction
    limit = {
        "cores": "the cores are the limit",
        "lane": "the lane is the limit",
        "latency": "as fast as so few rooms in flight allow",
    }[mine.bound]
    if option is chosen:
        return limit
    if mine.rooms_per_s * _NEAR < best.rooms_per_s:
        return f"{best.rooms_per_s / mine.rooms_per_s:.1f} times fewer rooms a second; {limit}"
    if mine.p50_us > best.p50_us * _NEAR:
        return f"{mine.p50_us / best.p50_us:.1f} times the latency"
    if option.padded_ratio > chosen.padded_ratio + 0.01:
        return f"about as good, but {option.padded_ratio:.0%} of its bytes fill up pages"
    return "about as good"


def paths(options: Iterable[Option]) -> list[str]:
    """Paths that were considered, each once."""
    return list(dict.fromkeys(option.path for option in options))
