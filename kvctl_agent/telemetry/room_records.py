"""Current values of the active rooms of an agent, and what happens to them, as records of the region's log."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from operator import attrgetter
from typing import Any

from kvctl_agent.contract.snapshots import Failure, Role
from kvctl_agent.contract.states import RoomState
from kvctl_agent.telemetry import records as rec

Append = Callable[[tuple[Any, ...]], None]
"""Appends a record to the log."""

_PEERS_AT_ONCE = 128  # in one record: peers choose their names
_values = attrgetter(*rec.ROOM_FIELDS)


class RoomValues:
    """Present values of a room on this rank.

    Attributes:
        serial: number of the room in the log.
        room, nonce: unsigned 64-bit numbers.
        nonces: prefill: one nonce for each decode rank that opened the room here.
        planned, sent, landed, scattered: numbers of coverage cells (writer, chunk, layer). `planned` is 0 until the
            plan is known. `sent` is None on a decode rank; `landed` and `scattered` are None on a prefill rank.
        bytes, parts: KV bytes and parts sent (prefill) or landed (decode).
        parked: number of parts that are gated now: they wait for a grant or the watermark.
        peers: agent names of the ranks at the other end.
        request_id, traceparent: the engine's id of the request and its W3C trace context; "" if it passed none.
        first_ready_at: prefill, monotonic: time of the first `ready`; the latency is measured from here.
        forward_begun_at, forward_done_at: prefill, monotonic: start and end of the forward; None if the engine did
            not report it.
    """

    finished_at: int | None = None
    state_now = RoomState.BOOTSTRAPPING
    first_ready_at: int | None = None
    forward_begun_at: int | None = None
    forward_done_at: int | None = None
    failure: Failure | None = None
    request_id = traceparent = ""
    planned: int | None = 0
    sent: int | None = None
    landed: int | None = None
    scattered: int | None = None
    tokens: int | None = None
    pages: int | None = None
    bytes = 0
    parts = 0
    parked = 0

    serial: int
    room: int
    nonce: int
    opened_at: int
    state_at: int
    nonces: list[int]
    peers: list[str]

    def __init__(self, serial: int, room: int, nonce: int, role: Role, opened_at: int) -> None:
        values = self.__dict__
        values["serial"], values["room"], values["nonce"] = serial, room, nonce
        values["opened_at"] = values["state_at"] = opened_at
        values["nonces"], values["peers"] = [], []
        if role == "prefill":
            values["sent"] = 0
        else:
            values["landed"] = values["scattered"] = 0

    def state(self, new_state: RoomState, at: int) -> None:
        """Records that the room entered `new_state` at monotonic `at`."""
        self.__dict__["state_now"] = new_state
        self.state_at = at

    def finish(self, at: int) -> int | None:
        """Records that the room ended at monotonic `at`, unless its end is already recorded; returns `latency_ns`."""
        if self.finished_at is None:
            self.finished_at = at
        return self.latency_ns

    @property
    def latency_ns(self) -> int | None:
        """Time in ns from open to success (decode) or from first ready part to sent (prefill); None without success."""
        if self.finished_at is None or self.state_now is not RoomState.SUCCESS:
            return None
        begin = self.opened_at if self.sent is None else self.first_ready_at
        return None if begin is None else self.finished_at - begin


class RoomRecord(RoomValues):
    """Writes what happens to one room.

    Callers set single fields directly; that marks the record as changed, so that `Telemetry.flush` writes its values.
    The methods change several fields, or append what happened to the log.

    Attributes:
        key: room and nonce at the beginning; a prefill rank learns the nonce later.
        changed: whether the record waits to be written.
    """

    planned: int = 0
    key: tuple[int, int]
    changed: bool
    _append: Append
    _changes: deque[RoomRecord]

    def __init__(
        self,
        append: Append,
        changed: deque[RoomRecord],
        serial: int,
        room: int,
        nonce: int,
        role: Role,
        opened_at: int,
    ) -> None:
        """Creates the record of an open room.

        Args:
            append: appends a record to the log.
            changed: where the record adds itself when a value has changed.
        """
        super().__init__(serial, room, nonce, role, opened_at)
        values = self.__dict__
        values["key"], values["changed"], values["_append"], values["_changes"] = (room, nonce), False, append, changed

    def __setattr__(self, name: str, value: object) -> None:
        values = self.__dict__
        values[name] = value
        if not values["changed"]:
            values["changed"] = True
            self._changes.append(self)

    def event(
        self,
        stage: str,
        at: int,
        writer: int | None = None,
        chunk: int | None = None,
        layers: tuple[int, int] | None = None,
        peer: str | None = None,
        detail: str = "",
    ) -> None:
        """Adds an event to the timeline.

        Args:
            stage: name of the event, for example a stage of `contract.states.STAGES`.
            at: monotonic time.
            writer, chunk, layers: index of the writer in its prefill instance, index of the chunk, and layers [lo, hi)
                of the part; None for an event of the whole room.
            peer: agent name at the other end; None if there is no single one.
            detail: further text.
        """
        self._append((rec.EVENT, self.serial, stage, at, writer, chunk, layers, peer, detail))

    def part(
        self,
        key: rec.PartKey,
        peer: str | None,
        path: str,
        nbytes: int,
        moments: Mapping[str, int],
        forward_done_ns: int | None,
    ) -> None:
        """Counts one part that was sent (prefill) or landed (decode); arguments as for `Telemetry.part`."""
        values = self.__dict__
        if self.first_ready_at is None:
            values["first_ready_at"] = moments.get("ready")
        values["bytes"] = self.bytes + nbytes
        self.parts += 1
        self._append((rec.PART, self.serial, key, peer, path, nbytes, moments, forward_done_ns))

    def fail(self, failure: Failure, at: int) -> None:
        """Stores the cause of the room's failure, unless an earlier cause is stored: the first cause is reported.

        Args:
            failure: the cause.
            at: monotonic ns at which this rank learned of the failure.
        """
        if self.failure is None:
            self.failure = failure
            self._append_failure(failure, at)

    def join(self, peer: str, nonce: int) -> None:
        """Adds a decode rank that has opened the room, under its nonce; the first nonce is shown."""
        self.nonce = self.nonce or nonce
        self.peers.append(peer)
        self.nonces.append(nonce)
        self._append_peers(len(self.peers) - 1)

    def expect(self, peers: list[str]) -> None:
        """Sets the peers of the room."""
        self.peers[:] = peers
        self._append_peers(0)

    def leave(self, peer: str, nonce: int) -> None:
        """Removes a decode rank that has recalled the room; it may open the room again, under another nonce."""
        self.peers.remove(peer)
        self.nonces.remove(nonce)
        self.nonce = self.nonces[0] if self.nonces else 0
        self._append_peers(0)

    def write(self, kind: int, *more: Any) -> None:
        """Appends the present values to the log, as a record of this kind."""
        self.__dict__["changed"] = False
        self._append((kind, *_values(self), *more))

    def write_base(self) -> None:
        """Appends all that is known of the room, for readers that know nothing."""
        self.write(rec.BASE_ROOM)
        self._append_peers(0)
        if (failure := self.failure) is not None:
            self._append_failure(failure, self.state_at)

    def _append_failure(self, failure: Failure, at: int) -> None:
        cause = failure["rank"], failure["code"], failure["at_ns"], failure["text"]
        self._append((rec.FAILED, self.serial, *cause, at))

    def _append_peers(self, first: int) -> None:
        peers, nonces = self.peers[first:], self.nonces[first:]
        for at in range(0, max(1, len(peers), len(nonces)), _PEERS_AT_ONCE):
            until = at + _PEERS_AT_ONCE
            self._append((rec.PEERS, self.serial, first + at, peers[at:until], nonces[at:until]))


class RoomRecords:
    """The records of the active rooms; one thread calls `open` and `close`, any thread the other methods."""

    def __init__(self, append: Append, role: Role) -> None:
        self._append = append
        self._role: Role = role
        self._active: dict[tuple[int, int], RoomRecord] = {}
        self.changed: deque[RoomRecord] = deque()
        self.next_serial = 1

    def open(self, room: int, nonce: int, at_ns: int) -> RoomRecord:
        """Creates the record of a new active room; a prefill rank, which does not know the nonce yet, passes 0.

        Raises:
            ValueError: a room with this number and nonce is already active.
        """
        key = (room, nonce)
        if key in self._active:
            raise ValueError(f"room {room} with nonce {nonce} is already open")
        serial = self.next_serial
        self.next_serial = serial + 1
        record = RoomRecord(self._append, self.changed, serial, room, nonce, self._role, at_ns)
        self._active[key] = record
        self._append((rec.OPENED, serial, room, nonce, at_ns))
        return record

    def close(self, record: RoomRecord) -> bool:
        """Removes a record from the active ones; returns whether it was one."""
        if self._active.get(record.key) is not record:
            return False
        del self._active[record.key]
        return True

    def __len__(self) -> int:
        return len(self._active)

    def active(self) -> list[RoomRecord]:
        """Returns the active records, oldest first."""
        return list(self._active.copy().values())

    def after(self, serial: int, limit: int) -> list[RoomRecord]:
        """Returns at most `limit` active records of higher serials, in their order."""
        return list(islice((each for each in self.active() if each.serial > serial), limit))

    def states(self) -> dict[str, int]:
        """Returns the number of active rooms by state label."""
        states = [record.state_now for record in self.active()]
        return {state.label: states.count(state) for state in dict.fromkeys(states)}
