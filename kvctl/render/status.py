"""Status of a fleet: the row of each agent, the totals with their rates, and the summary for a terminal.

Every rank of a room reports the room, so rooms are counted on one rank per decode instance (tp, pp and cp 0), and bytes
on all decode ranks. If no decode rank answered, prefill ranks are used. Quantiles of different ranks cannot be merged:
p50 is the median of the ranks' p50, p99 the maximum of their p99.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from kvctl.client.names import few_commas, replaced_by
from kvctl.health.halted_agents import SILENT_NS, Halted, calls_at_every_turn, engine_silence_ns, halt, last_call
from kvctl.render import palette, units
from kvctl.render.bars import filled
from kvctl.render.layers import PipelineDecisions
from kvctl.render.report import Block, Grid, Line, Span, Text
from kvctl.render.view import Column, Kind, Row, View, Width

_GAUGE = 20
_MAX_NAMES = 8
_ORDINAL = re.compile(r":\d+$")
_DRAINING = "KV_DRAINING"


def _ring(row: Row) -> float | None:
    ring = row.get("ring")
    return ring["used_bytes"] / ring["size_bytes"] if ring and ring["size_bytes"] else None


def _active(row: Row) -> int | None:
    rooms = row.get("rooms")
    return None if rooms is None else sum(rooms.values())


def _rank(row: Row) -> str:
    """Formats a rank's coordinates on the axes of size 2 or more: `tp2`, `dp1 tp0`."""
    sizes = row.get("sizes", {})
    split = [f"{axis}{row['rank'][axis]}" for axis in ("dp", "pp", "cp", "tp") if sizes.get(axis, 1) > 1]
    return " ".join(split)


def integration(row: Row) -> str | None:
    """Formats the engine that an agent is part of, with its version and mode: `sglang 0.5.23 observe`."""
    found = row.get("integration")
    return found and " ".join(filter(None, (found["engine"], found["engine_version"], found["mode"])))


def _health(row: Row) -> str:
    """Formats the health codes that the caller added to an agent's row; for a draining agent never "ok"."""
    codes = [*row["health"]]
    if row.get("draining") and _DRAINING not in codes:
        codes.append("draining")
    return ",".join(codes) or "ok"


# 78 cells wide, so that a line fits on every terminal.
STATUS_LINES = View(
    "status_watch",
    (
        Column("at", Kind.SECOND, header="TIME", fixed=8),
        Column("agents", Kind.COUNT, help="Agents that answered.", header="UP", fixed=3),
        Column("bootstrapping", Kind.COUNT, help="Rooms in Bootstrapping.", header="BOOT", fixed=4),
        Column("waiting", Kind.COUNT, help="Rooms in WaitingForInput.", header="WAIT", fixed=4),
        Column("transferring", Kind.COUNT, help="Rooms in Transferring.", header="XFER", fixed=4),
        Column(
            "done_per_s",
            Kind.RATE,
            help="Successful rooms per second since the previous line.",
            header="DONE/S",
            fixed=6,
        ),
        Column(
            "failed_per_s", Kind.RATE, help="Failed rooms per second since the previous line.", header="FAIL/S", fixed=6
        ),
        Column("gb_per_s", Kind.RATE, help="Transfer rate since the previous line.", header="GB/S", fixed=6),
        Column("ring", Kind.RATIO, help="Share of all rings in use.", fixed=6),
        Column("p50", Kind.DURATION, help="Median over the ranks' median latencies.", fixed=8),
        Column("p99", Kind.DURATION, help="Largest of the ranks' 99th percentiles of latency.", fixed=8),
        Column(
            "health",
            Kind.COUNT,
            help="Warnings and critical findings; unknown if there are none and not all agents answered.",
            header="WARN",
            styles={"0": "green", "": "bold red"},
            fixed=4,
        ),
    ),
)


def _total(key: str) -> Callable[[Row], Any]:
    """Returns a function that reads a total of a row of GROUPS, which is computed for rows on screen only."""

    def value(row: Row) -> Any:
        summary = row["totals"].summary if "totals" in row else None
        return None if summary is None else summary.columns[key]

    return value


def _of_group(key: str) -> Callable[[Row], Any]:
    """Returns a function that reads a value of a row of GROUPS, or of its group: computed for rows on screen only."""

    def value(row: Row) -> Any:
        return getattr(row["of"], key) if key not in row and "of" in row else row.get(key)

    return value


_HEALTH_STYLES = {"ok": "green", "draining": "yellow", "": "bold red"}

GROUPS = View(
    "status_groups",
    (
        Column("group", help="Host, instance or role; indented below it, those of its agents that are odd."),
        Column("role", help="prefill, decode or both.", styles=palette.ROLES, path=_of_group("role")),
        Column("hosts", help="Name of the host; the number of hosts if there are several.", path=_of_group("place")),
        Column("up", help="Agents that answered, of those that are known or missing.", path=_of_group("up")),
        Column("active", Kind.COUNT, help="Active rooms.", path=_total("active")),
        Column("failed", Kind.COUNT, help="Rooms failed since the start.", path=_total("failed")),
        Column(
            "gb_per_s",
            Kind.RATE,
            help="Sum of the ranks' rates while rooms are open.",
            path=_total("gb_per_s"),
            header="GB/S",
        ),
        Column("p50", Kind.DURATION, Width.NORMAL, "Median over the ranks' median latencies.", path=_total("p50_ns")),
        Column(
            "p99",
            Kind.DURATION,
            Width.NORMAL,
            "Largest of the ranks' 99th percentiles of latency.",
            path=_total("p99_ns"),
        ),
        Column("ring", Kind.RATIO, Width.NORMAL, "Share of all rings in use.", path=_total("ring_ratio")),
        Column(
            "health",
            help="ok; or why the group is odd: health codes, silent or missing agents, draining, slow (less than a "
            "third of the median rate), or the version or setting in which it differs from most ranks of its role.",
            path=_of_group("health"),
            styles=_HEALTH_STYLES,
        ),
    ),
    identity=("fold", "group"),
)


STATUS = View(
    "status",
    (
        Column("agent", path="name"),
        Column("role", styles=palette.ROLES),
        Column("active", Kind.COUNT, help="Active rooms.", path=_active),
        Column(
            "done", Kind.COUNT, help="Rooms finished with success since the start.", path="rooms_finished_total.Success"
        ),
        Column("failed", Kind.COUNT, help="Rooms failed since the start.", path="rooms_finished_total.Failed"),
        Column("gb_per_s", Kind.RATE, help="Transfer rate while rooms are open.", path="rate.gb_per_s", header="GB/S"),
        Column("p50", Kind.DURATION, Width.NORMAL, "Median latency of rooms.", path="latency.p50_ns"),
        Column("p99", Kind.DURATION, help="99th percentile of the latency of rooms.", path="latency.p99_ns"),
        Column("ring", Kind.RATIO, Width.NORMAL, "Decode rank: share of the ring in use.", path=_ring),
        Column(
            "health",
            help="Health codes of findings about this agent; ok if there are none, incomplete if there are none and "
            "it did not answer everything.",
            path=_health,
            styles=_HEALTH_STYLES,
        ),
        Column("rank", width=Width.NORMAL, help="Coordinates on the parallelism axes of size 2 or more.", path=_rank),
        Column("peers", Kind.MAP, Width.NORMAL, "Peers, by state.", path="peers"),
        Column("transport", width=Width.NORMAL, help="Transfer engine.", path="transport.engine"),
        Column("uptime", Kind.DURATION, Width.NORMAL),
        Column("moved", Kind.BYTES, Width.WIDE, "KV bytes sent or landed since the start.", path="bytes_total"),
        Column("rooms", Kind.MAP, Width.WIDE, "Active rooms, by state.", path="rooms"),
        Column(
            "rooms_per_s",
            Kind.RATE,
            Width.WIDE,
            "Rooms finished per second.",
            path="rate.rooms_per_s",
            header="ROOMS/S",
        ),
        Column("p90", Kind.DURATION, Width.WIDE, "90th percentile of the latency of rooms.", path="latency.p90_ns"),
        Column(
            "ring_high_water",
            Kind.BYTES,
            Width.WIDE,
            "Decode rank: most ring bytes in use at once.",
            path="ring.high_water_bytes",
        ),
        Column("ring_size", Kind.BYTES, Width.WIDE, "Decode rank: size of the ring.", path="ring.size_bytes"),
        Column("pipeline", width=Width.WIDE, help="Prefill rank: mode of layer pipelining.", path="pipeline.mode"),
        Column(
            "decisions",
            Kind.MAP,
            Width.WIDE,
            "Prefill rank: forwards by pipelining decision.",
            path="pipeline.decisions",
        ),
        Column("backend", width=Width.WIDE, help="Backend of the transfer engine.", path="transport.backend"),
        Column("lanes", Kind.LIST, Width.WIDE, "Transport lanes in use.", path="transport.lanes"),
        Column("device", width=Width.WIDE, help="Device of the KV pool."),
        Column("host", width=Width.WIDE),
        Column("instance", width=Width.WIDE, help="Ranks that serve together, called by the stem of their names."),
        Column("pid", Kind.ID, Width.WIDE),
        Column("version", width=Width.WIDE),
        Column(
            "integration",
            width=Width.WIDE,
            help="Engine that the agent is part of, its version, and the mode: backend, replace or observe.",
            path=integration,
        ),
        Column("incarnation", width=Width.WIDE),
        Column(
            "waiting_for",
            width=Width.WIDE,
            help="What the agent waits for, such as ranks of one of its prefill instances.",
        ),
        Column("draining", Kind.FLAG, Width.WIDE, "Whether it accepts no new rooms."),
        Column("process_state", width=Width.WIDE, help="State of its process, from the kernel.", header="PROCESS"),
        Column("turn_age", Kind.DURATION, Width.WIDE, "Time since its control loop began a turn."),
        Column("engine_call", width=Width.WIDE, help="The engine's latest call of the agent."),
        Column("engine_call_age", Kind.DURATION, Width.WIDE, "Time since that call."),
        Column("ended_age", Kind.DURATION, Width.WIDE, "Time since its process ended."),
        Column("published_age", Kind.DURATION, Width.WIDE, "Age of what the agent last published for its observer."),
    ),
    identity=("name",),
    sort=("-role", "agent"),
    also=(("With --by, or more than 32 agents", GROUPS), ("With -w", STATUS_LINES)),
)


def status_line(summary: FleetSummary, change: Rates, now_ns: int, problems: int | None) -> dict[str, Any]:
    """Returns the row of STATUS_LINES for one reading.

    `problems` is the number of warnings and critical findings; None if there are none in an incomplete reading.
    """
    return {
        "at_ns": now_ns,
        "agents": summary.agents,
        "bootstrapping": summary.active.get("Bootstrapping", 0),
        "waiting": summary.active.get("WaitingForInput", 0),
        "transferring": summary.active.get("Transferring", 0),
        "done_per_s": change.succeeded_per_s,
        "failed_per_s": change.failed_per_s,
        "gb_per_s": change.gb_per_s,
        "ring_ratio": summary.ring_ratio,
        "p50_ns": summary.p50_ns,
        "p99_ns": summary.p99_ns,
        "health": problems,
    }


def runs(row: Row) -> bool:
    """Returns whether an agent answered `status` and has not ended; for one that has, its observer answered."""
    return "rooms" in row and row.get("ended_age_ns") is None


def screen(rows: Sequence[Row], silent: int, health: Sequence[Span], table: Grid | None = None) -> list[Block]:
    """Formats the summary of the fleet and a table.

    Args:
        rows: rows of STATUS; rows of agents that did not answer have only name, host, health and perhaps role.
    """
    answered = [row for row in rows if runs(row)]
    table = table or Grid(STATUS, rows)
    if not answered:
        return [table]
    summary = summarise(answered)
    lines: list[Line] = [
        _line("fleet", *health, *_agents(rows, silent)),
        *_ranks(rows),
        _line("rooms", *_rooms(summary)),
        _line("ring", *_ring_use(summary)),
        _line("rate", *_rate(summary)),
        _line("latency", *_latency(summary)),
        *_pipeline(answered),
        *_unavailable(summary),
        *_hung(answered),
    ]
    return [Text(lines), table]


def outline(rows: Sequence[Row], summary: FleetSummary) -> list[Line]:
    """Formats ranks, rooms, rings, pipelining, and draining or waiting agents, for `kvctl top`.

    Args:
        rows: rows of the agents that answered, and of those that have ended.
        summary: totals of the former.
    """
    return [
        *_ranks(rows),
        _line("rooms", *_rooms(summary)),
        _line("ring", *_ring_use(summary)),
        *_pipeline([row for row in rows if runs(row)]),
        *_unavailable(summary),
        *_hung(rows),
    ]


def _unavailable(summary: FleetSummary) -> list[Line]:
    """Formats the agents that accept no new rooms: draining ones, and ones that wait for other agents."""
    lines = []
    if summary.draining:
        names = [name for name, _ in summary.draining]
        ages = [age for _, age in summary.draining if age is not None]
        since = f" for {units.duration(max(ages))}" if ages else ""
        resume = " ".join(names) if len(names) <= _MAX_NAMES else "--all"
        lines.append(
            _line(
                "draining",
                (few_commas(names, _MAX_NAMES), "bold"),
                (f"{since}, no new rooms: kvctl resume {resume}", "yellow"),
            )
        )
    waiting: dict[str, list[str]] = {}
    for name, text in summary.waiting:
        waiting.setdefault(text, []).append(name)
    lines += [
        _line("waiting", (few_commas(names, _MAX_NAMES), "bold"), (f": {text}", "yellow"))
        for text, names in waiting.items()
    ]
    return lines


def _hung(rows: Iterable[Row]) -> list[Line]:
    """Formats the agents whose process is stopped, whose control loop does not run, or whose engine is silent."""
    lines = []
    for row in rows:
        found = halt(row, row["name"])
        if found is not None and found.kind is not Halted.ENDED:
            lines.append(_line(found.kind, (row["name"], "bold"), (f" {found.text.partition(':')[0]}", "bold red")))
        elif calls_at_every_turn(row) and (engine_silence_ns(row) or 0) >= SILENT_NS:
            lines.append(_line("engine", ("that of ", ""), (row["name"], "bold"), (f" {last_call(row)}", "yellow")))
    more = len(lines) - _MAX_NAMES
    return [*lines[:_MAX_NAMES], *([_line("", (f"and {more} more", "bold red"))] if more > 0 else [])]


def _line(label: str, *spans: Span) -> Line:
    return [(f"{label:<9}", "dim"), *spans]


def _agents(rows: Sequence[Row], silent: int) -> list[Span]:
    agents, hosts = sum(runs(row) for row in rows), len({row.get("host") for row in rows})
    halts = Counter(found.kind for row in rows if (found := halt(row, row["name"])) is not None)
    where = f" on {hosts} hosts" if hosts > 1 else ""
    spans: list[Span] = [(f"   {agents:,} agent{'s' * (agents != 1)}{where}", "")]
    if silent:
        spans.append((f", {silent} not answering", "bold red"))
    for kind, number in halts.items():
        spans.append((f", {number} {kind}", palette.AGENT_STATES[kind]))
    return spans


def _ranks(rows: Sequence[Row]) -> list[Line]:
    lines = []
    for role in ("prefill", "decode", ""):  # the role of an engine without an agent may be unknown
        known = [row for row in rows if row.get("role") == role and not replaced_by(row["name"])]
        ranks = [row for row in known if runs(row)]
        if not ranks:
            continue
        instances = {(row.get("instance"), tuple(row["sizes"].items())) for row in ranks}
        whole = max(len(known), sum(prod(size for _, size in sizes) for _, sizes in instances))
        shapes = sorted({" ".join(f"{axis}{size}" for axis, size in sizes if size > 1) for _, sizes in instances})
        engines = " and ".join(sorted(filter(None, {_engine(row) for row in ranks})))
        devices = " and ".join(_devices({row["device"] for row in ranks if row["device"]}))
        shape = " and ".join(each or "one rank" for each in shapes)
        ranks_of = f"{len(ranks)} of {whole} ranks answered ({shape})"
        if shapes == [""] and whole == len(ranks):
            ranks_of = f"{len(ranks)} rank{'s' * (len(ranks) != 1)} answered"
        named = {name for name, _ in instances if name}
        if len(named) > 1 and shapes != [""]:
            ranks_of += f" in {len(named)} instances"
        lines.append(
            _line(
                role or "no role",
                (ranks_of, palette.ROLES.get(role, "") if len(ranks) >= whole else "yellow"),
                (f", {engines}", ""),
                (f", pools on {devices}" if devices else "", ""),
            )
        )
    return lines


def _devices(names: Iterable[str]) -> list[str]:
    """Returns the devices; of more than two with the same kind only the kind, such as `cuda`."""
    kinds: dict[str, list[str]] = {}
    for name in sorted(names):
        kinds.setdefault(device_kind(name), []).append(name)
    return [each for kind, found in kinds.items() for each in (found if len(found) <= 2 else [kind])]


def device_kind(device: str) -> str:
    """Returns the device without its number: `cuda` for `cuda:3`."""
    return _ORDINAL.sub("", device)


def _engine(row: Row) -> str:
    """Returns what transfers, as far as it is known; of an engine without an agent its name."""
    transport = row["transport"]
    if not transport["engine"]:
        return integration(row) or ""
    lanes = transport.get("lanes") or []
    return f"{transport['engine']} over {', '.join(lanes)}" if lanes else str(transport["engine"])


def _rooms(summary: FleetSummary) -> list[Span]:
    spans: list[Span] = []
    for state, number in summary.active.items():
        if number:
            spans += [(f"{number:,}", "bold"), (f" {state}   ", palette.STATES.get(state, ""))]
    spans = spans or [("none active   ", "dim")]
    spans += [(f"{summary.succeeded_total:,}", "bold"), (" done", "")]
    if summary.failed_total:
        spans += [("   ", ""), (f"{summary.failed_total:,} failed", "bold red")]
    spans.append((f"   (at {summary.counted} ranks", "dim"))
    if summary.counted == "decode" and summary.prefill_active > sum(summary.active.values()):
        spans.append((f"; prefill ranks have {summary.prefill_active:,} active", "yellow"))
    spans.append((")", "dim"))
    return spans


def _ring_use(summary: FleetSummary) -> list[Span]:
    ratio = summary.ring_ratio
    if ratio is None:
        return [("no decode rank has a staging ring", "dim")]
    used, size = units.size(summary.ring_used_bytes), units.size(summary.ring_size_bytes)
    high = units.percent(summary.ring_high_water_bytes / summary.ring_size_bytes)
    ahead = ", the rest granted ahead" if ratio > 1 else ""
    return [
        (filled(ratio, _GAUGE), "yellow" if ratio > 0.8 else "cyan"),
        (f"  {used} of {size} ({units.percent(ratio)}{ahead}), high water {high}", ""),
    ]


def _rate(summary: FleetSummary) -> list[Span]:
    if summary.gb_per_s is None:
        return [("idle", "dim")]
    rooms = "" if summary.rooms_per_s is None else f"  {units.three_digits(summary.rooms_per_s)} rooms/s"
    return [
        (f"{units.three_digits(summary.gb_per_s)} GB/s", "bold"),
        (f" while rooms are open{rooms}  (sum over {summary.counted} ranks)", ""),
    ]


def _pipeline(rows: Sequence[Row]) -> list[Line]:
    decisions = PipelineDecisions(rows)
    return [] if decisions.off else [_line("pipeline", *decisions.summary())]


def _latency(summary: FleetSummary) -> list[Span]:
    if summary.p50_ns is None:
        return [("no room finished yet", "dim")]
    rooms = f"{units.count(summary.latencies)} room{'s' * (summary.latencies != 1)}"
    return [
        (f"p50 {units.duration(summary.p50_ns)}  p99 {units.duration(summary.p99_ns)}", "bold"),
        (f"  (median and worst of {summary.counted} ranks, {rooms})", ""),
    ]


Status = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FleetSummary:
    """Totals of one fleet at one time; None is unknown.

    Attributes:
        prefill_active: rooms open on prefill ranks, including those that no decode rank has opened.
        counted: role of the ranks on which rooms, bytes and latency were counted: "decode" or "prefill".
        waiting: agents that wait for others, with the reason they report.
        draining: agents that accept no new rooms, with the time since their drain (ns).
        gb_per_s: sum of the ranks' rates, each over the wall-clock time of its own transfers.
    """

    agents: int
    counted: str
    active: Mapping[str, int]
    prefill_active: int
    succeeded_total: int
    failed_total: int
    bytes_total: int
    gb_per_s: float | None
    rooms_per_s: float | None
    ring_used_bytes: int
    ring_high_water_bytes: int
    ring_size_bytes: int
    p50_ns: int | None
    p99_ns: int | None
    latencies: int
    waiting: Sequence[tuple[str, str]]
    draining: Sequence[tuple[str, int | None]]

    @property
    def ring_ratio(self) -> float | None:
        return self.ring_used_bytes / self.ring_size_bytes if self.ring_size_bytes else None

    @property
    def columns(self) -> dict[str, Any]:
        """Totals for a row of GROUPS or HOSTS."""
        return {
            "active": sum(self.active.values()),
            "failed": self.failed_total,
            "gb_per_s": self.gb_per_s,
            "p50_ns": self.p50_ns,
            "p99_ns": self.p99_ns,
            "ring_ratio": self.ring_ratio,
        }


class Totals:
    """Totals of ranks, summed up when they are read."""

    def __init__(self, ranks: Sequence[Status]) -> None:
        self._ranks = ranks

    @cached_property
    def summary(self) -> FleetSummary | None:
        """Totals of the ranks; None if there are none."""
        return summarise(self._ranks) if self._ranks else None


def summarise(statuses: Iterable[Status]) -> FleetSummary:
    """Sums up the answers of all ranks to `status`, without those whose process has ended."""
    ranks = [rank for rank in statuses if runs(rank)]
    decode = [rank for rank in ranks if rank["role"] == "decode"]
    prefill = [rank for rank in ranks if rank["role"] == "prefill"]
    counted = decode or ranks
    leads, latencies, rates = _leads(counted), [rank["latency"] for rank in counted], [rank["rate"] for rank in counted]
    finished = _totals(rank["rooms_finished_total"] for rank in leads)
    rings = [ring for rank in ranks if (ring := rank["ring"])]
    p50s = sorted(each for latency in latencies if (each := latency["p50_ns"]) is not None)
    p99s = [each for latency in latencies if (each := latency["p99_ns"]) is not None]
    return FleetSummary(
        agents=len(ranks),
        counted="decode" if decode else "prefill",
        active=_totals(rank["rooms"] for rank in leads),
        prefill_active=sum(sum(rank["rooms"].values()) for rank in _leads(prefill)),
        succeeded_total=finished.get("Success", 0),
        failed_total=finished.get("Failed", 0),
        bytes_total=sum([rank["bytes_total"] for rank in counted]),
        gb_per_s=_sum([rate["gb_per_s"] for rate in rates]),
        rooms_per_s=_sum([rank["rate"]["rooms_per_s"] for rank in leads]),
        ring_used_bytes=sum([ring["used_bytes"] for ring in rings]),
        ring_high_water_bytes=sum([ring["high_water_bytes"] for ring in rings]),
        ring_size_bytes=sum([ring["size_bytes"] for ring in rings]),
        p50_ns=p50s[(len(p50s) - 1) // 2] if p50s else None,
        p99_ns=max(p99s, default=None),
        latencies=sum([latency["count"] for latency in latencies]),
        waiting=[(rank["name"], rank["waiting_for"]) for rank in ranks if rank["waiting_for"]],
        draining=[(rank["name"], rank.get("draining_age_ns")) for rank in ranks if rank.get("draining")],
    )


def _totals(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sums up counts by their key; faster than a Counter, which checks the type of every mapping."""
    totals: dict[str, int] = {}
    for each in counts:
        for key, number in each.items():
            totals[key] = totals.get(key, 0) + number
    return totals


def _leads(ranks: Sequence[Status]) -> Sequence[Status]:
    """Returns the ranks with tp, pp and cp 0, one per instance and dp group; all ranks if none of these answered."""
    return [rank for rank in ranks if not ((at := rank["rank"]).get("tp") or at.get("pp") or at.get("cp"))] or ranks


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


@dataclass(frozen=True, slots=True)
class Rates:
    """Changes between two summaries per second of wall clock; None if unknown."""

    gb_per_s: float | None = None
    succeeded_per_s: float | None = None
    failed_per_s: float | None = None


def rates(before: FleetSummary, after: FleetSummary, elapsed_ns: int) -> Rates:
    """Computes rates from the differences of counters.

    All rates are None if a counter decreased or the number of agents changed, because ranks joined or left.
    """
    moved = after.bytes_total - before.bytes_total
    succeeded = after.succeeded_total - before.succeeded_total
    failed = after.failed_total - before.failed_total
    if elapsed_ns <= 0 or min(moved, succeeded, failed) < 0 or before.agents != after.agents or not after.agents:
        return Rates()
    seconds = elapsed_ns / 1e9
    return Rates(moved / elapsed_ns, succeeded / seconds, failed / seconds)
