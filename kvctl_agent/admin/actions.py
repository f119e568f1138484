"""Handlers of the admin commands that change something.

They run on the thread of the agent's link to its observer and return within about two seconds: a longer measurement
continues in the background, and repeating the request returns its result. All commands are idempotent and report
"unchanged" if there is nothing to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from kvctl_agent.contract.admin import ErrorCode
from kvctl_agent.contract.snapshots import ActionResult, Probe, ProbeRow, Result
from kvctl_agent.errors import ConfigError, KvctlError, LocalProtocolError, RequestRefused
from kvctl_agent.parts import AgentParts
from kvctl_agent.protocol import events as ev
from kvctl_agent.runtime.peer_connections import Measurement
from kvctl_agent.transport.cost_probe import ConnectionCost

_ANSWER_S = 1.0  # less than the observer waits for an answer
_MOST_PROBED_BYTES = 64 << 20
_UNCLAIMED_NS = 10_000_000_000  # after which the result of a probe for which nobody asks again is dropped
_WAITS = ("bootstrap_timeout_s", "waiting_timeout_s")


class AdminActions:
    """Admin commands that the agent carries out: each is a method of the same name, with keyword arguments."""

    def __init__(self, parts: AgentParts, client: Callable[[], str]) -> None:
        """Creates the handlers of the agent with these components.

        Args:
            parts: the agent's components.
            client: returns the origin of the current request, as in `ClientRequest.origin`, for the flight recorder.
        """
        self._parts = parts
        self._client = client
        self._probes: dict[tuple[str, int | None], Measurement] = {}

    def handlers(self) -> Mapping[str, Callable[[dict[str, Any]], Any]]:
        """Returns the handlers by command name, for `ObserverLink`."""
        acts = self.abort, self.release, self.forget, self.drain, self.resume, self.set, self.probe
        return {act.__name__: lambda args, act=act: act(**args) for act in acts}  # type: ignore[misc]

    def abort(self, room: int, reason: str = "") -> list[ActionResult]:
        text = f"aborted by an operator{f': {reason}' if reason else ''}"
        answer = self._ask(lambda ticket: ev.AbortRoom(room, text, ticket))
        if answer.result == "unknown":
            raise self._unknown(room)
        return [self._answered(f"room {room}", answer, room)]

    def release(self, serial: int | None = None, room: int | None = None, force: bool = False) -> list[ActionResult]:
        if self._parts.role != "decode":
            raise self._refusal(f"{self._parts.name} is a prefill rank: rings are on decode ranks")
        if (serial is None) == (room is None):
            raise RequestRefused(ErrorCode.BAD_ARGUMENT, "release takes either serial or room")
        answer = self._ask(lambda ticket: ev.ReleaseHeld(ticket, serial or 0, room, force))
        if answer.result == "unknown" and room is not None:
            raise self._unknown(room)
        return [self._answered(f"allocation {serial}" if room is None else f"room {room}", answer, room)]

    def forget(self, peer: str, force: bool = False) -> list[ActionResult]:
        answer = self._ask(lambda ticket: ev.Forget(ticket, peer, force))
        return [self._answered(f"peer {peer}", answer, None)]

    def drain(self) -> list[ActionResult]:
        before = self._change(self._parts.lifecycle.begin_drain)
        left = len(self._parts.telemetry.rooms)
        text = f"takes no new rooms; {f'{left} in flight: kvctl wait --for drained' if left else 'none in flight'}"
        return [self._done("rooms", "unchanged" if before else "draining", text)]

    def resume(self) -> list[ActionResult]:
        before = self._change(self._parts.lifecycle.resume)
        return [self._done("rooms", "accepting" if before else "unchanged", "takes new rooms")]

    def _change(self, change: Callable[[], None]) -> bool:
        """Begins or ends draining; returns whether the agent was draining before."""
        before = self._parts.lifecycle.draining
        try:
            change()
        except LocalProtocolError as error:
            raise self._refusal(str(error)) from None
        return before

    def set(self, key: str, value: str) -> list[ActionResult]:
        parts = self._parts
        settings = parts.settings
        try:
            before, now = settings.change(key, value, f"admin {self._client()}")
        except ConfigError as error:
            raise RequestRefused(ErrorCode.BAD_ARGUMENT, str(error)) from None
        if before == now:
            return [self._done(key, "unchanged", f"{key} is already {_shown(now)}")]
        if key in _WAITS:
            self._parts.mailbox.put(ev.SetTimeouts(*(int(settings[wait] * 1e9) for wait in _WAITS)))
        else:
            parts.pipelining.change(key, now)
        return [self._done(key, "set", f"{key} = {_shown(now)}, was {_shown(before)}; until the agent ends")]

    def probe(self, peer: str | None = None, bytes: int | None = None, busy: bool = False) -> Probe:
        """Measures the cost of writes to a peer, between parts.

        If the measurement takes longer than a second, the reply has `running` set, and repeating the request returns
        the result.

        Args:
            peer: agent name of the peer; None: the first connected one.
            bytes: size of the largest write, 1 to 64 MiB; None for the default.
            busy: whether to measure even if rooms are open, whose parts then wait.

        Raises:
            RequestRefused: this is not a prefill rank, `bytes` is out of range, rooms are open and `busy` is not set,
                the peer is silent or not connected, or the measurement failed.
        """
        parts = self._parts
        if parts.role != "prefill" or parts.transfers is None:
            raise self._refusal(f"{self._parts.name} is a decode rank: connections are measured by prefill ranks")
        if bytes is not None and not 1 << 20 <= bytes <= _MOST_PROBED_BYTES:
            raise RequestRefused(ErrorCode.BAD_ARGUMENT, f"bytes is from {1 << 20} to {_MOST_PROBED_BYTES}")
        now_ns = time.monotonic_ns()
        for old, measurement in list(self._probes.items()):
            if measurement.cost.done() and now_ns - measurement.asked_ns >= _UNCLAIMED_NS:
                del self._probes[old]
        key = peer or "", bytes
        running = self._probes.get(key)
        if running is None:
            rooms = parts.machine.open_rooms
            if rooms and not busy:
                raise self._refusal(
                    f"{parts.name} has {rooms} open room{'s' * (rooms != 1)}, whose parts would wait for the probe: "
                    "--busy probes all the same"
                )
            self._check_lease(peer or next(iter(list(parts.connections.by_peer)), ""))
            try:
                running = parts.connections.begin(peer, bytes)
            except KvctlError as error:
                raise self._refusal(str(error)) from None
            self._record(f"the connection to {running.peer} is probed")
        self._probes[key] = running._replace(asked_ns=now_ns)
        cost: ConnectionCost | None = None
        try:
            cost = running.cost.result(_ANSWER_S)
        except KvctlError as error:
            del self._probes[key]
            raise self._refusal(str(error)) from None
        except TimeoutError:
            pass
        answer: Probe = {
            "agent": self._parts.name,
            "peer": running.peer,
            "lane": running.lane,
            "running": cost is None,
            "moved_bytes": None if cost is None else cost.moved_bytes,
            "rows": [],
        }
        if cost is not None:
            del self._probes[key]
            answer["rows"] = self._rows(running.peer, cost)
        return answer

    # ---- parts ------------------------------------------------------------------------------------------------

    def _rows(self, peer: str, cost: ConnectionCost) -> list[ProbeRow]:
        *many_us, big_us = cost.us_taken
        points = [(1, 64, cost.us_per_write, cost.us_per_write)]
        points += [
            (many, nbytes, each, write)
            for many, (nbytes, each), write in zip(cost.counts, cost.us_by_bytes, many_us, strict=True)
        ]
        points.append((1, cost.big_bytes, cost.big_bytes / cost.write_gb_per_s / 1e3, big_us))
        return [
            {
                "agent": self._parts.name,
                "peer": peer,
                "bytes": nbytes,
                "descriptors": descriptors,
                "write_ns": round(write * 1e3),
                "descriptor_ns": round(each * 1e3),
                "gb_per_s": descriptors * nbytes / max(write, 1e-3) / 1e3,
            }
            for descriptors, nbytes, each, write in points
        ]

    def _check_lease(self, name: str) -> None:
        """Raises RequestRefused if the peer has been silent for too long, since its registered memory may be gone."""
        peer, now_ns = self._parts.machine.peers.get(name), time.monotonic_ns()
        if peer is not None and not peer.may_post(now_ns):
            silent_s = (now_ns - peer.heard_ns) / 1e9
            raise self._refusal(f"{name} has been silent for {silent_s:.1f} s, so nothing may be written to it")

    def _ask(self, make: Callable[[int], ev.Event]) -> ev.Answered:
        """Sends a request to the protocol state machine and returns its answer.

        Args:
            make: returns the event for the state machine, given the request's number.

        Raises:
            RequestRefused: the state machine refuses the request, or has not answered in time.
        """
        answer = self._parts.control.requests.ask(make, _ANSWER_S)
        if answer is None:
            text = f"the control loop of {self._parts.name} has not answered within {_ANSWER_S:g} s and may still do it"
            raise RequestRefused(ErrorCode.TIMEOUT, text)
        if answer.result == "refused":
            raise self._refusal(answer.text)
        return answer

    def _unknown(self, room: int) -> RequestRefused:
        """Returns the refusal for a room that the machine does not know; the observer knows if it has ended."""
        return RequestRefused(ErrorCode.UNKNOWN_ROOM, f"{self._parts.name} knows no room {room}, active or recent")

    def _answered(self, subject: str, answer: ev.Answered, room: int | None) -> ActionResult:
        return self._done(subject, answer.result, answer.text, room)  # type: ignore[arg-type]

    def _done(self, subject: str, result: Result, text: str, room: int | None = None) -> ActionResult:
        if result != "unchanged":
            self._record(f"{result}: {text}", room)
        return {"agent": self._parts.name, "subject": subject, "result": result, "text": text}

    def _refusal(self, text: str) -> RequestRefused:
        return RequestRefused(ErrorCode.REFUSED, text)

    def _record(self, text: str, room: int | None = None) -> None:
        self._parts.telemetry.recorder.record("operator", f"{text} (asked by {self._client()})", "warning", room)


def _shown(value: object) -> str:
    return "auto" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
