"""Bootstrap registry of one prefill instance, without I/O: records which ranks have registered and which are missing.

Prefill ranks register; decode ranks look up the roster until the instance is complete.
"""

from __future__ import annotations

from collections import deque

import msgspec

from kvctl_agent.errors import LayoutError, RemoteProtocolError
from kvctl_agent.layout.parallel import ParallelConfig, RankCoord

MAX_REQUEST_BYTES = 1 << 16
_SHOWN = 32  # missing ranks that are listed by name
_HOLDS_NS = 5_000_000_000  # a holder that has not registered for this long may be replaced by any process of its name
_REPLACED_KEPT = 16


class Rank(msgspec.Struct, frozen=True):
    """Registration of one prefill rank: its endpoint, incarnation and place in the instance."""

    name: str
    endpoint: str
    incarnation: int
    coord: list[int]
    sizes: list[int]


class Register(msgspec.Struct, frozen=True, tag="register"):
    rank: Rank


class Lookup(msgspec.Struct, frozen=True, tag="lookup"):
    """Request of a decode rank for the roster; `name` is the name of the sender."""

    name: str


class Roster(msgspec.Struct, frozen=True, tag="roster"):
    """Answer to Register and Lookup: the registered ranks in the order of unique ranks; the missing ones as text."""

    ranks: list[Rank]
    size: int  # number of ranks of the instance; 0 before the first has registered
    missing: str
    refused: str = ""

    @property
    def complete(self) -> bool:
        """Whether all ranks of the instance are registered."""
        return bool(self.size) and not self.missing and not self.refused


Request = Register | Lookup

encode = msgspec.msgpack.Encoder().encode
_request: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_roster = msgspec.msgpack.Decoder(Roster)


def decode_request(frame: bytes) -> Request:
    """Decodes a request; raises RemoteProtocolError if it is invalid."""
    try:
        return _request.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"not a registry request: {error}") from None


def decode_roster(frame: bytes) -> Roster:
    """Decodes a roster; raises RemoteProtocolError if it is invalid."""
    try:
        return _roster.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"not a registry answer: {error}") from None


class Registry:
    """Registered ranks of one prefill instance; the first rank to register determines the instance's sizes.

    The process that registered last for a rank is its holder. If a replaced process continues after having been frozen,
    it does not become the holder again while the present holder keeps registering.
    """

    def __init__(self) -> None:
        self._side: ParallelConfig | None = None
        self._since_ns = 0  # when the first rank registered
        self._ranks: dict[int, Rank] = {}
        self._by_name: dict[str, int] = {}
        self._heard_ns: dict[int, int] = {}
        self._replaced: dict[int, deque[int]] = {}  # by rank, earlier incarnations of its holder

    def answer(self, request: Request, now_ns: int) -> Roster:
        """Registers the sender of a Register request; returns the roster for either request. Never raises."""
        refused = self._register(request.rank, now_ns) if isinstance(request, Register) else ""
        ranks = [self._ranks[unique] for unique in sorted(self._ranks)]
        return Roster(ranks, self._side.size if self._side else 0, self._missing(), refused)

    def _register(self, rank: Rank, now_ns: int) -> str:
        if len(rank.sizes) != 4 or len(rank.coord) != 4:
            return f"{rank.name}: sizes and coordinates need the four axes dp, pp, cp, tp"
        try:
            dp, pp, cp, tp = rank.sizes
            side = ParallelConfig(dp, pp, cp, tp)
            unique = side.unique_rank(RankCoord(*rank.coord))
        except LayoutError as error:
            return f"{rank.name}: {error}"
        if self._side is None:
            self._side = side
            self._since_ns = now_ns
        if side != self._side:
            return f"{rank.name} is of an instance of sizes {rank.sizes}, this registry serves {self._side}"
        other = self._by_name.get(rank.name, unique)
        if other != unique and now_ns - self._heard_ns[other] < _HOLDS_NS:
            here, there = side.label(side.coord(unique)), side.label(side.coord(other))
            return (
                f"{rank.name} as {here}, because {there} has the same name: give every agent its own name, or set "
                "name_suffix"
            )
        holder = self._ranks.get(unique)
        if holder is not None and holder.name != rank.name:
            return f"{rank.name} claims {side.label(side.coord(unique))}, which {holder.name} holds"
        if holder is not None and holder.incarnation != rank.incarnation:
            replaced = self._replaced.setdefault(unique, deque(maxlen=_REPLACED_KEPT))
            if rank.incarnation < holder.incarnation and now_ns - self._since_ns < _HOLDS_NS:
                replaced.append(rank.incarnation)  # a registry that has just started does not know who was replaced
            if rank.incarnation in replaced and now_ns - self._heard_ns[unique] < _HOLDS_NS:
                return (
                    f"{rank.name} (incarnation {rank.incarnation:016x}) was replaced by incarnation "
                    f"{holder.incarnation:016x} at {holder.endpoint}: end this one, or give it its own name"
                )
            replaced.append(holder.incarnation)
        if other != unique:
            del self._ranks[other]  # the process has come back with other coordinates
        self._by_name[rank.name] = unique
        self._ranks[unique] = rank
        self._heard_ns[unique] = now_ns
        return ""

    def _missing(self) -> str:
        """Returns text such as "6 of 8 prefill ranks registered, missing tp=2,3"; "" when the instance is complete."""
        side = self._side
        if side is None:
            return "no prefill rank has registered"
        absent = [unique for unique in range(side.size) if unique not in self._ranks]
        if not absent:
            return ""
        shown = absent[:_SHOWN]
        if side.size == side.tp:
            names = "tp=" + ",".join(str(unique) for unique in shown)
        else:
            names = "; ".join(side.label(side.coord(unique)) for unique in shown)
        if len(absent) > _SHOWN:
            names += f" and {len(absent) - _SHOWN} more"
        return f"{side.size - len(absent)} of {side.size} prefill ranks registered, missing {names}"
