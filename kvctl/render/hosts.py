"""Views of hosts: one row per host with its agents, their instances, their activity and the clock of the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvctl.client.fleet import Survey
from kvctl.render import units
from kvctl.render.groups import By, Group, groups
from kvctl.render.report import Block, Grid, Line, Text
from kvctl.render.status import STATUS, device_kind
from kvctl.render.view import Column, Kind, Row, View, Width

HOSTS = View(
    "hosts",
    (
        Column("host", help="Name of the host; the address of one whose agents have never told it."),
        Column("up", Kind.COUNT, help="Agents that answered."),
        Column("silent", Kind.COUNT, help="Agents that did not answer."),
        Column("prefill", Kind.COUNT, Width.NORMAL, "Prefill ranks that answered."),
        Column("decode", Kind.COUNT, Width.NORMAL, "Decode ranks that answered."),
        Column("instances", Kind.LIST, help="Instances that have ranks on this host."),
        Column("device", Kind.LIST, Width.NORMAL, "Kinds of devices of the KV pools."),
        Column("active", Kind.COUNT, help="Active rooms."),
        Column("failed", Kind.COUNT, help="Rooms failed since the agents' start."),
        Column("gb_per_s", Kind.RATE, help="Sum of the ranks' rates while rooms are open.", header="GB/S"),
        Column("ring", Kind.RATIO, Width.NORMAL, "Share of the host's rings in use."),
        Column("rtt", Kind.DURATION, Width.NORMAL, "Shortest round trip to an agent of this host."),
        Column("clock_offset", Kind.DURATION, Width.NORMAL, header="CLOCK"),
        Column("clock_error", Kind.DURATION, Width.NORMAL, header="±"),
        Column(
            "health",
            help="Why agents of this host are odd, as in kvctl status --by host; ok if none is.",
            path=lambda row: ", ".join(row["health"]) or "ok",
            styles={"ok": "green", "": "bold red"},
        ),
        Column("draining", Kind.COUNT, Width.WIDE, "Agents that accept no new rooms."),
        Column("done", Kind.COUNT, Width.WIDE, "Rooms finished with success since the agents' start."),
        Column("rooms", Kind.MAP, Width.WIDE, "Active rooms, by state."),
        Column("p50", Kind.DURATION, Width.WIDE, "Median over the ranks' median latencies."),
        Column("p99", Kind.DURATION, Width.WIDE, "Largest of the ranks' 99th percentiles of latency."),
        Column("versions", Kind.LIST, Width.WIDE, "Versions of kvctl."),
    ),
    empty="no hosts",
)


def host_rows(rows: Sequence[Row], survey: Survey) -> list[dict[str, Any]]:
    """Returns the rows of HOSTS, odd hosts first."""
    return [_row(group, survey) for group in groups(rows, By.HOST)]


def _row(group: Group, survey: Survey) -> dict[str, Any]:
    agents = [agent for agent in survey.agents if agent.host == group.name]
    clock = min((agent.clock for agent in agents), key=lambda clock: clock.error_ns, default=None)
    roles = [row["role"] for row in group.ranks]
    found: dict[str, Any] = {
        "host": group.name or None,
        "up": len(group.ranks),
        "silent": len(group.silent),
        "prefill": roles.count("prefill"),
        "decode": roles.count("decode"),
        "instances": group.instances,
        "device": sorted({device_kind(row["device"]) for row in group.ranks}),
        "rtt_ns": min((agent.rtt_ns for agent in agents), default=None),
        "clock_offset_ns": clock and clock.offset_ns,
        "clock_error_ns": clock and clock.error_ns,
        "health": group.reasons,
        "draining": sum(bool(row.get("draining")) for row in group.ranks),
        "versions": sorted({row["version"] for row in group.ranks}),
    }
    if (summary := group.totals.summary) is not None:
        found |= {**summary.columns, "done": summary.succeeded_total, "rooms": dict(summary.active)}
    return found


def host_screen(host: Mapping[str, Any], agents: Sequence[Row]) -> list[Block]:
    """Formats one host for a terminal: its summary, and the table of its agents."""
    health = host["health"]
    lines: list[Line] = [
        _line(
            "host",
            (str(host["host"]), "bold"),
            ("  " + (", ".join(health) or "✓ ok"), "bold red" if health else "green"),
        ),
        _line(
            "agents", (f"{host['up']} answered", ""), (f", {host['silent']} silent" * bool(host["silent"]), "bold red")
        ),
        _line("serves", (", ".join(host["instances"]) or "-", "")),
    ]
    if host["rtt_ns"] is not None:
        clock = f"{units.offset(host['clock_offset_ns'])} ± {units.duration(host['clock_error_ns'])}"
        lines.append(_line("network", (f"round trip {units.duration(host['rtt_ns'])}, clock {clock}", "")))
    return [Text(lines), Grid(STATUS, agents)]


def _line(label: str, *spans: tuple[str, str]) -> Line:
    return [(f"{label:<9}", "dim"), *spans]
