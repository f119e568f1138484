"""A healthy, busy fleet built from plain answers, and functions that damage it.

Two prefill ranks (tp2) and two decode ranks (dp2): rooms queue for the forward, some are in progress, parts are gated
briefly, the ring has wrapped. Every test damages it in one way and checks the findings.
"""

from __future__ import annotations

import pickle
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from kvctl.cli import cli
from kvctl.client.calls import Call
from kvctl.client.clock import ClockOffset
from kvctl.client.endpoints import Discovery, Endpoint
from kvctl.client.fanout import Reply
from kvctl.client.faults import Fault
from kvctl.client.fleet import AgentAnswer, Survey
from kvctl.client.health_reads import HEALTH_CALLS, expand
from kvctl.health.codes import CODES, CODES_BY_NAME
from kvctl.health.engine import examine
from kvctl.health.finding import Code, Finding
from kvctl.health.snapshot import Snapshot
from kvctl.render.findings import figures
from kvctl_agent.contract.config import KEYS, KEYS_BY_NAME
from kvctl_agent.contract.metrics import METRICS
from kvctl_agent.observer.health import health
from tests.support import answers
from tests.support.answers import MS, NOW, S, allocation, gated_part, peer_row, role, room_row

MIB = 1 << 20
COMMANDS = re.compile("`([^`]+)`")
DISAGREEMENT = re.compile(
    r"\b1 (part|room|agent|request|exception|connection|message|cell)s\b|since before|two ends"
    r"|\b1 (part|room|agent)( of [\w@, -]+| \([^)]*\))? (wait|have|are|were)\b|\b\d\d+ (part|room|agent)\b"
)
PROGRAMS = {"cat", "kill", "ping", "py-spy", "ss", "prlimit", "dmesg", "timedatectl"}
STAGES_S = {"gate": 0.02, "queue": 0.01, "gather": 0.004, "post": 0.001, "wire": 0.006}


class Fleet:
    """The answers of every agent; tests change them.

    Attributes:
        answers: by agent name and command.
        faults, stale: agents that did not answer, and sockets of processes that have ended.
    """

    def __init__(self, prefill: int = 2, decode: int = 2) -> None:
        self.names = [f"prefill-{i}" for i in range(prefill)] + [f"decode-{i}" for i in range(decode)]
        self.answers: dict[str, dict[str, Any]] = {}
        self.hellos: dict[str, dict[str, Any]] = {}
        self.clocks: dict[str, ClockOffset] = {}
        self.faults: list[Fault] = []
        self.stale: list[str] = []
        self.failures = 0
        for name in self.names:
            self.hellos[name] = self._hello(name)
            self.clocks[name] = ClockOffset(20_000, 150_000)
            self.answers[name] = {
                "status": self._status(name, prefill, decode),
                "rooms": [],
                "history": [],
                "failed": {"rooms": [], "kept": 0, "dropped_total": 0},
                "staging": self._staging(name),
                "peers": [self._peer(name, other) for other in self.names if role(other) != role(name)],
                "metrics": self._metrics(name),
                "config": self._config(),
            }
        for number in range(24 if self.names else 0):
            self._busy_room(str(1000 + number), number, prefill, decode)

    # ---- what codes are asked -----------------------------------------------------------------------------------

    def snapshot(self, before: Fleet | None = None, apart_s: float = 5.0) -> Snapshot:
        """Returns a snapshot of this fleet; `before` is an earlier one, taken `apart_s` ago."""
        earlier = None if before is None else before.snapshot()
        taken = 1000 * S + (round(apart_s * S) if earlier else 0)
        return Snapshot(self.survey(), taken, earlier)

    def survey(self) -> Survey:
        discovery = Discovery(Path("/run/kvctl"), stale=[Endpoint(name, None) for name in self.stale])
        agents = [
            AgentAnswer(
                Endpoint(name, None),
                self.hellos[name],  # type: ignore[arg-type]
                200_000,
                self.clocks[name],
                self.answers[name],
            )
            for name in sorted(self.answers)
        ]
        return Survey(discovery, agents, list(self.faults))

    def find(self, code: str, before: Fleet | None = None, apart_s: float = 5.0) -> list[Finding]:
        """Returns the findings of one code."""
        return self._findings([CODES_BY_NAME[code]], before, apart_s)

    def examine(self, before: Fleet | None = None, apart_s: float = 5.0) -> list[Finding]:
        """Returns the findings of all codes, the most severe first."""
        return self._findings(CODES, before, apart_s)

    def _findings(self, codes: Iterable[Code], before: Fleet | None, apart_s: float) -> list[Finding]:
        """Returns findings, after a check that the answers of a large fleet to `health` lead to the same ones."""
        found = checked(examine(self.snapshot(before, apart_s), codes))
        for each in found:
            stacks = re.findall(r"kvctl stacks -e ([\w.@-]+)", each.remedy)
            assert self.answers.keys() >= {*stacks}, f"{each.code}: agents that do not answer have no stacks"
        large = self._in_brief(), before and before._in_brief()
        earlier = Snapshot(large[1], 1000 * S) if large[1] else None
        taken = 1000 * S + (round(apart_s * S) if earlier else 0)
        in_brief = examine(Snapshot(large[0], taken, earlier), codes)
        assert [(each.code, each.subject, each.severity) for each in in_brief] == [
            (each.code, each.subject, each.severity) for each in found
        ]
        return found

    def _in_brief(self) -> Survey:
        """Returns the survey that a large fleet of these agents would give."""
        fleet = self.copy()
        survey = fleet.survey()
        for agent in survey.agents:
            answers: Any = {call.command: agent.data[call.command] for call in HEALTH_CALLS}
            more = {command: data for command, data in agent.data.items() if command not in answers}
            del answers["history"]
            agent.data = {"health": health(**answers, now_ns=agent.hello["now_ns"]), **more}

        def ask(requests: Sequence[tuple[Endpoint, Call]]) -> list[Reply]:
            return [
                Reply(endpoint, call, fleet.answers[endpoint.name][call.command], None, 0, 0, 0)
                for endpoint, call in requests
            ]

        expand(survey, ask)
        return survey

    def copy(self) -> Fleet:
        """Copies the fleet, faster than `deepcopy`."""
        copied: Fleet = pickle.loads(pickle.dumps(self))
        return copied

    # ---- words to harm it with ----------------------------------------------------------------------------------

    def gone(self, name: str) -> None:
        """Lets an agent's process be gone."""
        del self.answers[name]

    def status(self, name: str, **changes: Any) -> None:
        self.answers[name]["status"].update(changes)

    def peer(self, name: str, other: str, **changes: Any) -> None:
        """Returns the row that `name` reports of its peer `other`."""
        next(row for row in self.answers[name]["peers"] if row["peer"] == other).update(changes)

    def setting(self, key: str, value: Any) -> None:
        """Change a setting of every agent."""
        for each in self.answers.values():
            next(row for row in each["config"] if row["key"] == key)["value"] = value

    def room(self, name: str, room: str, **changes: Any) -> dict[str, Any]:
        """Returns a room of this agent, a new one or an existing one."""
        rows = self.answers[name]["rooms"]
        row = next((row for row in rows if row["room"] == room), None)
        if row is None:
            row = room_row(name, room)
            rows.insert(0, row)
        row["coverage"] = {**row["coverage"], **changes.pop("coverage", {})}
        row.update(changes)
        return row

    def failed(self, names: Iterable[str], room: str, code: str, rank: str, text: str, ago_s: float = 20) -> None:
        """Adds a room that all of these agents report as failed, first failed by `rank`."""
        at_ns = NOW - round(ago_s * S)
        failure = {"rank": rank, "code": code, "at_ns": at_ns, "text": text}
        self.failures += 1
        for name in names:
            row = room_row(name, room)
            row.update(
                nonce=str(self.failures), state="Failed", finished_at_ns=at_ns, failure=failure, owed={}, missing=[]
            )
            self.answers[name]["history"].insert(0, row)
            self.answers[name]["failed"]["rooms"].insert(0, row)

    def allocation(self, name: str, serial: int, **changes: Any) -> dict[str, Any]:
        """Returns an allocation of this decode rank's ring, the newest or an existing one."""
        rows = self.answers[name]["staging"]["ring"]["allocations"]
        row = next((row for row in rows if row["serial"] == serial), None)
        if row is None:
            row = allocation(serial)
            rows.append(row)
        row.update(changes)
        return row

    def oldest(self, name: str, serial: int, **changes: Any) -> None:
        """Adds an allocation older than all others."""
        self.allocation(name, serial, **changes)
        self.answers[name]["staging"]["ring"]["allocations"].sort(key=lambda row: row["serial"] != serial)

    def gated(self, name: str, peer: str, room: str, **changes: Any) -> None:
        """Adds a part of this prefill rank that may not be written yet."""
        part = gated_part(room=room, peer=peer, **changes)
        self.answers[name]["staging"]["gated"].append(part)

    def metric(self, name: str, metric: str, value: float, **labels: str) -> None:
        """Sets one sample of a counter or gauge."""
        samples = self._family(name, metric)["samples"]
        sample = next((sample for sample in samples if sample["labels"] == labels), None)
        if sample is None:
            sample = {"labels": labels}
            samples.append(sample)
        sample["value"] = value

    def spend(self, name: str, stage: str, seconds: float, parts: int) -> None:
        """Adds to the time that parts have spent in a stage."""
        samples = self._family(name, "kvctl_stage_seconds")["samples"]
        sample = next(sample for sample in samples if sample["labels"] == {"stage": stage})
        sample["sum"] += seconds
        sample["count"] += parts

    def _family(self, name: str, metric: str) -> dict[str, Any]:
        return next(family for family in self.answers[name]["metrics"] if family["name"] == metric)

    # ---- what is well -------------------------------------------------------------------------------------------

    @staticmethod
    def _hello(name: str) -> dict[str, Any]:
        own = {"incarnation": life(name), "level": "admin", "capabilities": [], "integration": None}
        return answers.hello(name, **own, uptime_ns=600 * S)

    @staticmethod
    def _status(name: str, prefill: int, decode: int) -> dict[str, Any]:
        number, is_decode = int(name.partition("-")[2]), role(name) == "decode"
        return answers.status(
            name,
            sizes={"dp": decode, "pp": 1, "cp": 1, "tp": 1}
            if is_decode
            else {"dp": 1, "pp": 1, "cp": 1, "tp": prefill},
            pid=4242 + number,
            incarnation=life(name),
            integration=None,
            uptime_ns=600 * S,
            rooms={"WaitingForInput": 8, "Transferring": 4},
            rooms_finished_total={"Success": 1204, "Failed": 0},
            rooms_finished_5m={"Success": 1204},
            latency={"p50_ns": 120 * MS, "p90_ns": 400 * MS, "p99_ns": 900 * MS, "count": 602},
            ring={"size_bytes": 64 * MIB, "used_bytes": 24 * MIB, "high_water_bytes": 64 * MIB, "live": 3},
            peers={"ready": prefill if is_decode else decode},
            pipeline=None,
            memory_gb_per_s=None if is_decode else 8.0,
            process={"fds": 120, "fds_limit": 1024, "threads": 9, "rss_bytes": 1 << 30, "cpu_ns": 90 * S},
        )

    @staticmethod
    def _staging(name: str) -> dict[str, Any]:
        ring = {
            "size_bytes": 64 * MIB,
            "head_bytes": 8 * MIB,
            "round": 4,
            "used_bytes": 6 * MIB,
            "high_water_bytes": 64 * MIB,
            "watermark": {"round": 4, "tail": 0, "age_ns": 900 * MS},
            "allocations": [
                allocation(31, state="landed", age_ns=40 * MS),
                allocation(32, age_ns=900 * MS),
                allocation(33, writer="prefill-1", state="revoking", age_ns=600 * MS),
            ],
            "copies": {"waiting": 1, "copying_age_ns": 2 * MS, "turn_age_ns": 2 * MS},
            "granted_total": 33,
            "refused_total": 0,
            "refused_largest_bytes": None,
            "revoked_total": 2,
        }
        return {
            "agent": name,
            "role": role(name),
            "enabled": True,
            "fallbacks_total": 0,
            "ring": ring if role(name) == "decode" else None,
            "buffers": None,
            "gated": [],
        }

    @staticmethod
    def _peer(name: str, other: str) -> dict[str, Any]:
        lane: dict[str, Any] = {"watermark_sent": [4, 0, 40]}
        if role(name) == "prefill":
            lane = {"watermark_seen": [4, 0, 40], "lane_gb_per_s": 6.0, "lane_descriptor_ns": 900}
            lane["lane_measured_age_ns"] = 590 * S
        return peer_row(name, other, incarnation=life(other), last_heard_ns=700 * MS, control_queue=3, rooms=6, **lane)

    @staticmethod
    def _metrics(name: str) -> list[dict[str, Any]]:
        families: list[dict[str, Any]] = []
        for metric in METRICS:
            samples: list[dict[str, Any]] = []
            if metric.name == "kvctl_stage_seconds":
                samples = [
                    {"labels": {"stage": stage}, "value": None, "buckets": [], "sum": 400 * mean, "count": 400}
                    for stage, mean in STAGES_S.items()
                ]
            elif metric.kind == "counter" and not metric.labels:
                samples = [{"labels": {}, "value": 0}]
            families.append(
                {"name": metric.name, "kind": metric.kind, "unit": metric.unit, "help": metric.help, "samples": samples}
            )
        by_name = {family["name"]: family["samples"] for family in families}
        by_name["kvctl_rooms_opened_total"][0]["value"] = 1300 if role(name) == "decode" else 0
        by_name["kvctl_rooms_finished_total"].append({"labels": {"result": "Success"}, "value": 1204})
        by_name["kvctl_part_bytes_total"].append({"labels": {"path": "staged"}, "value": 400 * 2 * MIB})
        by_name["kvctl_parts_total"].append({"labels": {"path": "staged"}, "value": 400})
        return families

    @staticmethod
    def _config() -> list[dict[str, Any]]:
        return [
            {
                "key": key.name,
                "value": key.default,
                "default": key.default,
                "origin": "default",
                "unit": key.unit,
                "runtime": key.runtime,
                "help": key.help,
            }
            for key in KEYS
        ]

    def _busy_room(self, room: str, number: int, prefill: int, decode: int) -> None:
        """Most rooms wait for the forward, some are in progress; one in four has just ended."""
        reader = f"decode-{number % decode}"
        writers = [f"prefill-{i}" for i in range(prefill)]
        age = (number + 1) * S
        if number % 4 == 0:
            for name in (reader, *writers):
                row = room_row(name, room, state="Success", peers=writers if name == reader else [reader])
                row.update(finished_at_ns=NOW - age, state_age_ns=0, latency_ns=300 * MS, owed={}, missing=[])
                self.answers[name]["history"].append(row)
            return
        state = "Transferring" if number % 4 == 1 else "WaitingForInput"
        if state == "Transferring":
            age = min(age, 3 * S)
        for name in (reader, *writers):
            row = self.room(name, room, state=state, state_age_ns=age, age_ns=age, opened_at_ns=NOW - age)
            row["peers"] = writers if name == reader else [reader]
            if name == reader and state == "WaitingForInput":
                row["owed"] = dict.fromkeys(writers, 32)
                row["coverage"].update(landed=0, scattered=0)


def checked(findings: list[Finding]) -> list[Finding]:
    """Returns the findings after checking that each has a next command and that every command in them parses."""
    for each in findings:
        commands = COMMANDS.findall(each.remedy)
        assert each.remedy.startswith("`"), f"{each.code}: the remedy does not begin with a command: {each.remedy}"
        assert "could not examine" not in each.cause, each.cause
        shown = f"{each.cause}; {'; '.join(figures(each.evidence))}"
        assert not DISAGREEMENT.search(shown), f"{each.code}: numbers and words disagree: {shown}"
        for command in commands:
            parse(command)
    return findings


def parse(command: str) -> None:
    """Parses a command as the shell and the command line do, without running it.

    Raises:
        click.UsageError: kvctl has no such command, option or value.
        AssertionError: a program that hosts do not have.
    """
    program, *words = shlex.split(command)
    if program != "kvctl":
        assert program in PROGRAMS, command
        return
    for each in words:
        key, equals, _ = each.partition("=")
        assert not equals or key in KEYS_BY_NAME or key in {"role", "state"}, command
    parent: click.Context | None = None
    name: str | None = "kvctl"
    at: click.Command | None = cli
    while at is not None:
        parent = at.make_context(name, list(words), parent=parent)
        if not isinstance(at, click.Group):
            return
        name, at, words = at.resolve_command(parent, [*parent._protected_args, *parent.args])


def life(name: str) -> str:
    """Incarnation of an agent."""
    return f"{sum(map(ord, name)):016x}"
