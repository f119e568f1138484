"""A simulated fleet, the same in every run, and a feed that reads it when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvctl.client.calls import Call
from kvctl.client.clock import ClockOffset
from kvctl.client.endpoints import Discovery, Endpoint
from kvctl.client.faults import timed_out
from kvctl.client.fleet import AgentAnswer, Survey
from kvctl.health.finding import Finding, Severity
from kvctl.tui.app import TopApp
from kvctl.tui.feed import Question, Reading, RecordingPosition
from kvctl.tui.frame import Mode

MS = 1_000_000
S = 1_000_000_000
NOW = 1_760_000_000 * S
GROUPS = ((0, 16), (16, 32), (32, 48), (48, 64))
_STATES = ("Transferring", "Transferring", "WaitingForInput", "Bootstrapping")


def wave(*seed: int, low: float = 0.0, high: float = 1.0) -> float:
    """A deterministic number that looks random."""
    mixed = 2166136261
    for each in seed:
        mixed = (mixed ^ (each + 0x9E37)) * 16777619 % (1 << 32)
        mixed ^= mixed >> 13
    return low + (high - low) * (mixed % 10_007) / 10_007


class Specimen:
    """A fleet of `prefill` ranks of one instance and `decode` ranks of several, with a given number of rooms on each.

    Attributes:
        silent: agents that do not answer; gone: agents that no longer exist.
    """

    def __init__(self, canned: ModuleType, prefill: int = 4, decode: int = 4, rooms: int = 12) -> None:
        self._canned = canned
        self.prefill = [f"prefill-{rank}" for rank in range(prefill)]
        self.decode = [f"decode-{rank}" for rank in range(decode)]
        self.rooms = rooms
        self.silent: set[str] = set()
        self.gone: set[str] = set()

    @property
    def names(self) -> list[str]:
        return [*self.decode, *self.prefill]

    def survey(self, calls: Sequence[Call], beat: int) -> Survey:
        """Returns the fleet's answers at a beat; beats are one second apart."""
        found = Survey(Discovery(Path("/run/kvctl")), at_ns=NOW + beat * S, tick_ns=beat * S)
        for name in sorted(self.names):
            endpoint = Endpoint(name, Path(f"/run/kvctl/{name}.sock"))
            if name in self.gone:
                found.discovery.stale.append(endpoint)
            elif name in self.silent:
                found.faults.append(timed_out(name, 2 * S, local=True))
            else:
                hello = {**self._canned.hello(name), "now_ns": found.at_ns}
                data = {}
                for call in calls:
                    answer = getattr(self, f"_{call.command}")(name, beat, **call.args)
                    if answer is not None:
                        data[call.command] = answer
                found.agents.append(AgentAnswer(endpoint, hello, 180_000, ClockOffset(0, 90_000), data))
        return found

    def _number(self, name: str) -> int:
        return int(name.split("-")[1])

    def _reads(self, name: str) -> bool:
        return name.startswith("decode")

    def _status(self, name: str, beat: int) -> dict[str, Any]:
        number, reads = self._number(name), self._reads(name)
        used = round(wave(number, beat, low=0.2, high=0.75) * 64) << 20
        done = 1000 + beat * 6 + number
        return {
            **self._canned.status(name),
            "rank": {"dp": number if reads else 0, "pp": 0, "cp": 0, "tp": 0 if reads else number, "unique": number},
            "sizes": {"dp": len(self.decode), "pp": 1, "cp": 1, "tp": 1}
            if reads
            else {"dp": 1, "pp": 1, "cp": 1, "tp": len(self.prefill)},
            "uptime_ns": (3 * 3600 + 125 + beat) * S,
            "rooms": {
                "Bootstrapping": 1,
                "WaitingForInput": self.rooms // 4,
                "Transferring": max(0, self.rooms - 1 - self.rooms // 4),
            },
            "rooms_finished_total": {"Success": done, "Failed": 0},
            "rooms_finished_5m": {"Success": done},
            "bytes_total": (5 << 30) + sum(round(wave(number, each, low=0.8, high=1.6) * 4e8) for each in range(beat)),
            "rate": {"window_ns": 10 * S, "bytes": 4 << 30, "gb_per_s": 0.38 + number / 50, "rooms_per_s": 6.1},
            "latency": {
                "p50_ns": round(wave(number, beat, 3, low=18, high=24) * MS),
                "p90_ns": 34 * MS,
                "p99_ns": round(wave(number, beat, 4, low=40, high=70) * MS),
                "count": 602,
            },
            "ring": {"size_bytes": 64 << 20, "used_bytes": used, "high_water_bytes": 54 << 20, "live": 4}
            if reads
            else None,
            "peers": {"ready": len(self.prefill if reads else self.decode)},
        }

    def _rooms(self, name: str, beat: int, state: str | None = None, limit: int = 1000) -> list[dict[str, Any]]:
        rows = []
        for place in range(min(limit, self.rooms)):
            planned = 64 * (1 + place % 3)
            done = round(planned * wave(place, beat))
            reads = self._reads(name)
            rows.append(
                self._canned.room_row(
                    name,
                    str(4711 + place),
                    nonce=str(90 + place),
                    state=_STATES[place % 4],
                    age_ns=(self.rooms - place) * 310 * MS + beat * S,
                    state_age_ns=(self.rooms - place) * 170 * MS,
                    coverage={
                        "planned": planned,
                        "sent": None if reads else done,
                        "landed": done if reads else None,
                        "scattered": done // 2 if reads else None,
                    },
                    tokens=1024 * (1 + place % 3),
                    bytes=(16 << 20) * (1 + place % 3),
                    parked=int(not reads and place == 2),
                )
            )
        return [row for row in rows if state in {None, row["state"]}]

    def _history(self, name: str, beat: int, limit: int = 1000) -> list[dict[str, Any]]:
        """Rooms that ended every 1.7 s, one since the last second; a third of them failed."""
        rows = []
        for place in range(min(limit, 3 * self.rooms)):
            end = NOW + beat * S - place * 1700 * MS - 20 * MS
            failure = {"rank": name, "code": "ABORTED", "at_ns": end, "text": "aborted by the engine"}
            rows.append(
                self._canned.room_row(
                    name,
                    str(4700 + beat - place),
                    nonce=str(600 + beat - place),
                    state="Success" if place % 3 else "Failed",
                    opened_at_ns=end - 410 * MS,
                    finished_at_ns=end,
                    age_ns=410 * MS,
                    latency_ns=380 * MS if place % 3 else None,
                    tokens=1024 * (1 + place % 3),
                    bytes=(16 << 20) * (1 + place % 3),
                    failure=None if place % 3 else failure,
                )
            )
        return rows

    def _failed(self, name: str, beat: int, limit: int = 1000) -> dict[str, Any]:
        """Failed rooms with two causes; prefill ranks report all rooms, decode ranks their own."""
        reads = self._reads(name)
        if not self.prefill or not self.decode:
            return {"rooms": [], "kept": 0, "dropped_total": 0}
        rows = []
        for place in range(9):
            reader = self.decode[place % len(self.decode)]
            if reads and reader != name:
                continue
            lost = place % 3 > 0
            at = NOW - (place * 7 + 3) * S
            failure = {
                "rank": reader if lost else self.prefill[-1],
                "code": "KV_PEER_LOST" if lost else "KV_TRANSFER_FAILED",
                "at_ns": at,
                "text": f"peer {self.prefill[-1]} (incarnation c0ffee) lost: silent for 15.1 s"
                if lost
                else f"write to {reader} failed: NIXL_ERR_REMOTE_DISCONNECT",
            }
            rows.append(
                self._canned.room_row(
                    name,
                    str(4600 + place),
                    nonce=str(70 + place),
                    state="Failed",
                    opened_at_ns=at - 13 * S,
                    finished_at_ns=at + 3 * MS,
                    age_ns=13 * S,
                    missing=[],
                    failure=failure,
                )
            )
        return {"rooms": rows[:limit], "kept": len(rows), "dropped_total": 4 if name == self.prefill[0] else 0}

    def _room(self, name: str, beat: int, room: str) -> list[dict[str, Any]] | None:
        mine = name in self.prefill or name == self.decode[0]
        if int(room) != 4711 or not mine:
            return None
        event = self._canned.event
        events = [event(0 if self._reads(name) else 1, name, "open", detail="128 pages")]
        for writer in range(len(self.prefill)):
            for chunk in range(2):
                at = 4.0 + 22 * chunk + writer * 0.8
                moments = {"ready": 0, "gate": 1.5, "queue": 2, "gather": 4, "post": 4.4, "wire": 12 + 2 * writer}
                late = {"arrive": 12.3 + 2 * writer, "scatter": 15 + 2 * writer}
                whose = late if self._reads(name) else moments if name == self.prefill[writer] else {}
                for stage, after in whose.items():
                    peer = self.prefill[writer] if self._reads(name) else self.decode[0]
                    events.append(event(at + after, name, stage, writer, peer=peer, chunk=chunk, layers=[0, 64]))
        detail = self._canned.room_row(name, room, nonce="90", age_ns=61 * MS)
        return [{**detail, "timeline": sorted(events, key=lambda each: each["at_ns"]), "timeline_dropped": 0}]

    def _staging(self, name: str, beat: int) -> dict[str, Any]:
        answer: dict[str, Any] = self._canned.staging(name)
        if answer["ring"] is not None and self._number(name) != 1:
            answer["ring"]["allocations"] = answer["ring"]["allocations"][1:]
        for part in answer["gated"]:
            part["peer"] = self.decode[-1]
        return answer

    def _layers(self, name: str, beat: int, room: str | None = None) -> list[dict[str, Any]]:
        number, reads = self._number(name), self._reads(name)
        rows = []
        for place, group in enumerate(GROUPS):
            slow = 3.0 if place == 2 else 1.0
            times = (
                {"arrive": 0.4, "scatter": 2.5 * slow}
                if reads
                else {
                    "ready": 7.0 * place,
                    "gate": 0.5 + place / 4,
                    "queue": 0.2,
                    "gather": 2.0,
                    "post": 0.3,
                    "wire": 4.0 * slow + number / 10,
                }
            )
            rows.append(
                {
                    "agent": name,
                    "layers": list(group),
                    "path": "staged",
                    "parts": 900 - place,
                    "bytes": (900 - place) << 20,
                    "stages": {stage: self._canned.stage(took) for stage, took in times.items()},
                    "exposed_ns": None if reads else round((1 + place * 2.2) * MS),
                    "overlapped_ns": None if reads else 6 * MS,
                }
            )
        return rows

    def _peers(self, name: str, beat: int) -> list[dict[str, Any]]:
        shape = self._canned.peers("decode-0" if self._reads(name) else "prefill-0")[0]
        rows = []
        for other in self.prefill if self._reads(name) else self.decode:
            pair = {name, other}
            rows.append(
                {
                    **shape,
                    "agent": name,
                    "peer": other,
                    "role": other.split("-")[0],
                    "state": "suspect"
                    if pair == {"prefill-1", "decode-2"}
                    else "refused"
                    if pair == {"prefill-3", "decode-3"}
                    else "ready",
                    "differences": ["page_size 64 ≠ 32"] if pair == {"prefill-3", "decode-3"} else [],
                    "rooms": 3,
                }
            )
        return rows

    def _events(self, name: str, beat: int, since: int | None = None, limit: int = 1000) -> dict[str, Any]:
        number = self.names.index(name)
        kinds = (
            ("room", "info", "opened"),
            ("ring", "warning", "gated for 1.2 s on decode-3"),
            ("peer", "info", "ready"),
        )
        last = 6 + 2 * beat
        rows = [
            {
                "sequence": place,
                "at_ns": NOW - 10 * S + place * 800 * MS + number * 30 * MS,
                "agent": name,
                "kind": kinds[(place + number) % 3][0],
                "severity": "error" if (place, number) == (3, 1) else kinds[(place + number) % 3][1],
                "room": "4711" if (place + number) % 3 == 0 else None,
                "peer": "decode-3" if (place + number) % 3 == 1 else None,
                "text": kinds[(place + number) % 3][2],
            }
            for place in range(last)
        ]
        return {"events": rows[-limit:], "next": last, "dropped": 0}


class StillFeed:
    """Reads the specimen when a view asks, and when a test advances the time by a second."""

    def __init__(self, specimen: Specimen, recorded: bool = False) -> None:
        self.specimen = specimen
        self.recorded = recorded
        self.beats = 3
        self.paused = False
        self.problem = ""
        self.wanted: list[Question] = []
        self.stopped = False
        self._deliver: Callable[[Reading], None] = lambda reading: None

    def start(self, deliver: Callable[[Reading], None]) -> None:
        self._deliver = deliver
        for beat in range(self.beats):
            self._read(Question("overview", (Call("status"),)), beat)

    def ask(self, question: Question) -> None:
        self.wanted.append(question)
        self._read(question, self.beats)

    def beat(self) -> None:
        """Advances the time by a second."""
        self.beats += 1
        if not self.paused:
            self._read(self.wanted[-1], self.beats)

    def _read(self, question: Question, beat: int) -> None:
        position = RecordingPosition(beat, 40, not self.paused) if self.recorded else None
        if self.problem:
            self._deliver(Reading(question, NOW + beat * S, None, self.problem))
        else:
            survey = self.specimen.survey(question.calls, beat)
            self._deliver(Reading(question, survey.at_ns, survey, position=position))

    def acknowledge(self) -> None: ...

    def pause(self, paused: bool) -> None:
        self.paused = paused
        if not paused:
            self._read(self.wanted[-1], self.beats)

    def seek(self, step: int) -> None:
        self.paused = True
        self.beats = max(0, self.beats + step)
        self._read(self.wanted[-1], self.beats)

    def stop(self) -> None:
        self.stopped = True


FINDINGS = (
    Finding(
        code="KV_RING_PINNED",
        severity=Severity.CRITICAL,
        subject="decode-1 allocation 7",
        agents=("decode-1", "prefill-1"),
        cause="prefill-1 was granted 8 MiB 41 s ago for room 7 and has neither written nor given it back",
        remedy="make sure that prefill-1 is gone, then: kvctl staging release decode-1:7",
        evidence={"age_ns": 41 * S, "held_bytes": 8 << 20, "gated_total": 3},
        since_ns=41 * S,
    ),
    Finding(
        code="KV_COMPAT_MISMATCH",
        severity=Severity.WARNING,
        subject="prefill-3 → decode-3",
        agents=("prefill-3", "decode-3"),
        cause="page_size 64 (prefill-3) is not 32 (decode-3)",
        remedy="start both with the same page size",
        since_ns=185 * S,
    ),
)


Build = Callable[..., TopApp]
Drive = Callable[..., None]


@pytest.fixture
def specimen(canned: ModuleType) -> Specimen:
    return Specimen(canned)


@pytest.fixture
def large(canned: ModuleType) -> Specimen:
    """A fleet of 64 agents."""
    return Specimen(canned, prefill=32, decode=32, rooms=1000)


@pytest.fixture
def build() -> Build:
    """Builds an app that reads a specimen: `build(specimen, view, recorded=…)`."""

    def make(
        specimen: Specimen, view: str = "overview", recorded: bool = False, findings: Sequence[Finding] = ()
    ) -> TopApp:
        nobody = "no agent found in /run/kvctl. Start some here: kvctl demo"
        mode = Mode(source="fleet.kvrec" if recorded else "", no_agents=lambda survey: nobody)
        app = TopApp(StillFeed(specimen, recorded), mode, view, clock=lambda: 0)
        app.store.findings = findings
        app.store.examined_at_ns = NOW + 1000 * S
        return app

    return make


@pytest.fixture
def ill() -> Sequence[Finding]:
    """Two findings."""
    return FINDINGS


@pytest.fixture
def drive() -> Drive:
    """Runs a script against an app without a terminal: `drive(app, script, size)`; `script(pilot)` is a coroutine."""

    def run(app: TopApp, script: Callable[[Any], Awaitable[None]], size: tuple[int, int] = (120, 40)) -> None:
        async def inner() -> None:
            async with app.run_test(size=size, notifications=True) as pilot:
                await pilot.pause()
                await script(pilot)

        asyncio.run(inner())

    return run
