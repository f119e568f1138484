"""Bootstrap registry of one prefill instance, without I/O: records which ranks have registered and which are missing.

Prefill ranks register; decode ranks look up the roster until the instance is complete. Both also say where their admin
socket is, and operators' tools may ask for the list of all of them (`Registry.reply`) on the wire of admin sockets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from kvctl_agent.contract.addresses import AddressError, parse_endpoint
from kvctl_agent.contract.admin import MAGIC, MAX_REQUEST_ID_BYTES, ErrorCode
from kvctl_agent.contract.commands import REGISTRY_COMMANDS_BY_NAME
from kvctl_agent.contract.snapshots import ListedAgent, Role
from kvctl_agent.contract.states import MAX_ROOM
from kvctl_agent.errors import LayoutError, RemoteProtocolError
from kvctl_agent.layout.parallel import ParallelConfig, RankCoord

MAX_REQUEST_BYTES = 1 << 16
_SHOWN = 32  # missing ranks that are listed by name
_HOLDS_NS = 5_000_000_000  # a holder that has not registered for this long may be replaced by any process of its name
_LONGEST_PAUSE_NS = 1_000_000_000  # between two requests; more of a pause does not count: it may be a stall
_REPLACED_KEPT = 16
MAX_DECODE_RANKS = 4096
_MAX_TEXT = 1024  # characters of a name, an endpoint or a host
_LISTED_NS = 24 * 3600 * 1_000_000_000  # a decode rank that has not been heard for this long is listed no more
_LIST_EVERY_NS = 250_000_000  # the list is built at most this often: the registry shares its thread with transfers


class Whereabouts(msgspec.Struct, frozen=True):
    """Where operators find an agent; empty from older agents.

    Attributes:
        admin: tcp:// endpoint of its admin server, as it is bound.
        socket: path of its Unix socket, on its host.
        host: name of its host.
    """

    admin: str = ""
    socket: str = ""
    host: str = ""


NOWHERE = Whereabouts()


class Rank(msgspec.Struct, frozen=True):
    """Registration of one prefill rank: its endpoint, incarnation and place in the instance."""

    name: str
    endpoint: str
    incarnation: int
    coord: list[int]
    sizes: list[int]
    at: Whereabouts = NOWHERE


class Register(msgspec.Struct, frozen=True, tag="register"):
    rank: Rank


class Lookup(msgspec.Struct, frozen=True, tag="lookup"):
    """Request of a decode rank for the roster; `name` is the name of the sender, `incarnation` 0 from older agents."""

    name: str
    incarnation: int = 0
    at: Whereabouts = NOWHERE


class Decline(msgspec.Struct, frozen=True, tag="decline"):
    """Tells the instance that its engine will not send a room, which decode ranks may open: they fail with `reason`."""

    room: int
    reason: str

    def __post_init__(self) -> None:
        if not 0 <= self.room <= MAX_ROOM:
            raise ValueError(f"{self.room} is no room number")


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


Request = Register | Lookup | Decline

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


def checked(roster: Roster) -> Roster:
    """Returns the roster; an empty one that says why if nobody can connect to the endpoint of one of its ranks."""
    try:
        for rank in roster.ranks:
            parse_endpoint(rank.endpoint)
    except AddressError as error:
        return Roster([], 0, f"the registry's answer is invalid: rank {rank.name:.80}: {error}")
    return roster


class _Listed(msgspec.Struct, frozen=True):
    """What the registry knows of a decode rank, or of the last request of a prefill rank."""

    name: str
    incarnation: int
    at: Whereabouts
    address: str
    heard_ns: int


class _ListRequest(msgspec.Struct, frozen=True):
    """Body of a request on the admin wire."""

    cmd: str
    args: dict[str, Any] | None = None


_list_request: msgspec.json.Decoder[_ListRequest] = msgspec.json.Decoder(_ListRequest)


class Registry:
    """Registered ranks of one prefill instance; the first rank to register determines the instance's sizes.

    The process that registered last for a rank is its holder. If a replaced process continues after having been frozen,
    it does not become the holder again while the present holder keeps registering. After a stall of the whole host, the
    request of the replaced process may be read first; the time of the stall does not count.
    """

    def __init__(self) -> None:
        self._side: ParallelConfig | None = None
        self._asked_ns = 0  # when the last request came
        self._listened_ns = 0  # time in which requests were read
        self._since_ns = 0  # the same, when the first rank registered
        self._ranks: dict[int, Rank] = {}
        self._by_name: dict[str, int] = {}
        self._heard_ns: dict[int, int] = {}
        self._held_ns: dict[int, int] = {}  # by rank, `_listened_ns` when it was heard
        self._replaced: dict[int, deque[int]] = {}  # by rank, earlier incarnations of its holder
        self._addresses: dict[int, str] = {}
        self._decode: dict[tuple[str, str], _Listed] = {}  # by name and host, the one heard last at the end
        self._list: bytes = b""
        self._list_due_ns = 0
        self._replies = 0

    def answer(self, request: Request, now_ns: int, address: str = "") -> Roster:
        """Registers the sender of a Register request; returns the roster for any request. Never raises.

        Args:
            address: IP address of the sender; "" over a Unix socket.
        """
        self._listened_ns += min(max(0, now_ns - self._asked_ns), _LONGEST_PAUSE_NS)
        self._asked_ns = now_ns
        refused = ""
        if isinstance(request, Register):
            refused = self._register(request.rank, now_ns)
            if not refused:
                self._addresses[self._by_name[request.rank.name]] = address
        elif isinstance(request, Lookup):
            self._note_decode(request, now_ns, address)
        ranks = [self._ranks[unique] for unique in sorted(self._ranks)]
        return Roster(ranks, self._side.size if self._side else 0, self._missing(), refused)

    def reply(self, frames: Sequence[bytes], now_ns: int, wall_ns: int, refusal: str = "") -> list[bytes]:
        """Answers a request on the wire of admin sockets (`contract.admin`): the list of all agents. Never raises.

        Args:
            frames: frames of the request; the first is MAGIC.
            wall_ns: wall clock, for the reply.
            refusal: why the sender is not permitted to ask; "" if it is.
        """
        request_id = frames[1] if len(frames) > 1 and len(frames[1]) <= MAX_REQUEST_ID_BYTES else b""
        error = (ErrorCode.NOT_PERMITTED, refusal) if refusal else _request_error(frames)
        self._replies += 1
        envelope = b'"generated_at_ns":%d,"sequence":%d}' % (wall_ns, self._replies)
        if error is not None:
            content = msgspec.json.encode({"code": error[0].value, "message": error[1]})
            return [MAGIC, request_id, b'{"ok":false,"error":' + content + b"," + envelope]
        if now_ns >= self._list_due_ns or not self._list:
            self._list = msgspec.json.encode(self.agents(now_ns))
            self._list_due_ns = now_ns + _LIST_EVERY_NS
        return [MAGIC, request_id, b'{"ok":true,"data":' + self._list + b"," + envelope]

    def agents(self, now_ns: int) -> list[ListedAgent]:
        """Returns the registered prefill ranks in the order of unique ranks, then the decode ranks, latest first."""
        prefill = (
            _Listed(rank.name, rank.incarnation, rank.at, self._addresses.get(unique, ""), self._heard_ns[unique])
            for unique, rank in sorted(self._ranks.items())
        )
        rows = [_row(each, "prefill", now_ns) for each in prefill]
        recent = (each for each in reversed(self._decode.values()) if now_ns - each.heard_ns < _LISTED_NS)
        return rows + [_row(each, "decode", now_ns) for each in recent]

    def _note_decode(self, request: Lookup, now_ns: int, address: str) -> None:
        """Stores where a decode rank is, in place of the one that was heard least recently if there are too many."""
        if max(map(len, (request.name, request.at.admin, request.at.socket, request.at.host))) > _MAX_TEXT:
            return
        key = request.name, request.at.host
        self._decode.pop(key, None)
        if len(self._decode) >= MAX_DECODE_RANKS:
            del self._decode[next(iter(self._decode))]
        self._decode[key] = _Listed(request.name, request.incarnation, request.at, address, now_ns)

    def _register(self, rank: Rank, now_ns: int) -> str:
        if max(map(len, (rank.name, rank.endpoint, rank.at.admin, rank.at.socket, rank.at.host))) > _MAX_TEXT:
            return f"{rank.name:.80}: a name, endpoint or host is longer than {_MAX_TEXT} characters"
        try:
            parse_endpoint(rank.endpoint)
        except AddressError as error:
            return f"{rank.name}: {error}"
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
            self._since_ns = self._listened_ns
        if side != self._side:
            return f"{rank.name} is of an instance of sizes {rank.sizes}, this registry serves {self._side}"
        other = self._by_name.get(rank.name, unique)
        if other != unique and self._holds(other):
            here, there = side.label(side.coord(unique)), side.label(side.coord(other))
            return (
                f"{rank.name} as {here}, because {there} has the same name: give every agent its own name, or set "
                "name_suffix"
            )
        holder = self._ranks.get(unique)
        if holder is not None and holder.name != rank.name and self._holds(unique):
            return f"{rank.name} claims {side.label(side.coord(unique))}, which {holder.name} holds"
        if holder is not None and holder.incarnation != rank.incarnation:
            replaced = self._replaced.setdefault(unique, deque(maxlen=_REPLACED_KEPT))
            if rank.incarnation < holder.incarnation and self._listened_ns - self._since_ns < _HOLDS_NS:
                replaced.append(rank.incarnation)  # a registry that has just started does not know who was replaced
            if rank.incarnation in replaced and self._holds(unique):
                return (
                    f"{rank.name} (incarnation {rank.incarnation:016x}) was replaced by incarnation "
                    f"{holder.incarnation:016x} at {holder.endpoint}: end this one, or give it its own name"
                )
            replaced.append(holder.incarnation)
        if holder is not None and holder.name != rank.name:
            self._by_name.pop(holder.name, None)  # it was started again under another name
        if other != unique:
            del self._ranks[other]  # the process has come back with other coordinates
        self._by_name[rank.name] = unique
        self._ranks[unique] = rank
        self._heard_ns[unique], self._held_ns[unique] = now_ns, self._listened_ns
        return ""

    def _holds(self, unique: int) -> bool:
        return self._listened_ns - self._held_ns[unique] < _HOLDS_NS

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


def _request_error(frames: Sequence[bytes]) -> tuple[ErrorCode, str] | None:
    """Returns why a request on the admin wire cannot be answered; None if it asks for the list."""
    if len(frames) != 3 or len(frames[1]) > MAX_REQUEST_ID_BYTES:
        return ErrorCode.BAD_REQUEST, "a request has 3 frames: magic, request id and JSON"
    try:
        request = _list_request.decode(frames[2])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        return ErrorCode.BAD_REQUEST, f"the request is not valid: {error}"
    if request.cmd not in REGISTRY_COMMANDS_BY_NAME:
        return (
            ErrorCode.UNKNOWN_COMMAND,
            "this is the bootstrap registry of a prefill instance, not an agent: it answers "
            f"{', '.join(REGISTRY_COMMANDS_BY_NAME)}, as kvctl -e registry://HOST:PORT asks",
        )
    if request.args:
        return ErrorCode.BAD_ARGUMENT, f"{request.cmd} takes no arguments"
    return None


def _row(each: _Listed, role: Role, now_ns: int) -> ListedAgent:
    return {
        "name": each.name,
        "role": role,
        "host": each.at.host,
        "incarnation": f"{each.incarnation:016x}",
        "admin": each.at.admin,
        "socket": each.at.socket,
        "address": each.address,
        "heard_ns": max(0, now_ns - each.heard_ns),
    }
