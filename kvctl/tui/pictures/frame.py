"""The lines around every panel: whose fleet, how it fares, which view, what is out of the ordinary, which keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvctl.client.fleet import Survey
from kvctl.render import findings, palette, units
from kvctl.render.report import Line, Span
from kvctl.tui.store import Store

VIEWS = ("overview", "rooms", "staging", "layers", "peers", "events", "failed")
_SECOND = 1_000_000_000
_NAMED = 3  # silent agents that the banner names one by one
Ends = tuple[Line, Line]


@dataclass(frozen=True, slots=True)
class Mode:
    """How the screen is run.

    Attributes:
        paused_ns: for how long nothing has been updated; None while it is.
        source: the file that is replayed; "" for a live fleet.
        nobody: says of a survey without agents why there are none.
    """

    paused_ns: int | None = None
    source: str = ""
    nobody: Callable[[Survey], str] = lambda survey: "no agent found"
    readonly: bool = False


def top(store: Store, mode: Mode) -> Ends:
    """The first line: the fleet, its health, the time."""
    roles = {role: sum(agent.role == role for agent in store.agents.values()) for role in ("prefill", "decode")}
    spans: list[Span] = [("kvctl top  ", "bold accent")]
    for role, number in roles.items():
        if number:
            spans += [(str(number), "bold"), (f" {role}  ", palette.ROLES[role])]
    silent = len(store.silent) + len(store.unheard)
    if silent:
        spans.append((f"{silent} silent  ", "bold red"))
    if store.judged is not None and store.answering:
        spans.append(findings.headline([findings.row(finding) for finding in store.judged.raised]))
    at = units.clock_seconds(store.now_ns) if store.now_ns else "--:--:--"
    pace = "read-only  " if mode.readonly and not mode.source else ""
    return spans, [(pace, "dim"), (at, "bold")]


def tabs(view: str, path: Sequence[str]) -> Ends:
    """The views by number, the one on screen marked; behind it what was opened in it."""
    spans: list[Span] = []
    for number, name in enumerate(VIEWS, 1):
        here = name == view
        spans.append((f" {number} {name} ", "reverse bold" if here else "dim"))
    return [*spans, *((f" / {step}", "bold accent") for step in path)], []


def banner(store: Store, mode: Mode) -> list[Ends]:
    """What the operator must know to read the rest; a line each, usually none."""
    lines: list[Ends] = []
    place = store.place
    if place is not None:
        playing = place.playing and mode.paused_ns is None
        state = "playing" if playing else "held" if place.index < place.count - 1 else "at its end"
        text = f" {'▶' if playing else '■'} {mode.source}: moment {place.index + 1} of {place.count}, {state} "
        lines.append(([(text, "bold yellow"), ("  [ ] seek, space plays and holds", "dim")], []))
    elif mode.paused_ns is not None:
        age = units.duration(mode.paused_ns // _SECOND * _SECOND)
        lines.append(([(f" ■ paused: this is {age} old ", "bold yellow"), ("  space goes on", "dim")], []))
    if store.problem:
        lines.append(([(f"✗ {store.problem}", "bold red")], []))
    elif store.survey is not None and not store.agents:
        lines.append(([(f"✗ {mode.nobody(store.survey)}", "bold yellow")], []))
    troubles: list[Ends] = [
        ([(f"○ {fault.agent}: ", "bold yellow"), (fault.message, "yellow")], []) for fault in store.unheard
    ]
    for agent in store.silent:
        age = units.duration((store.stale_ns(agent.name) or 0) // _SECOND * _SECOND)
        troubles.append(([(f"○ {agent.name} silent for {age}: ", "bold yellow"), (agent.trouble, "yellow")], []))
    lines += troubles[:_NAMED]
    if len(troubles) > _NAMED:
        lines.append(([(f"○ and {len(troubles) - _NAMED} more do not answer", "bold yellow")], []))
    return lines


def footer(keys: Sequence[tuple[str, str]], width: int) -> Ends:
    """As many keys as there is room for, the most wanted first; how to quit always."""
    end: list[Span] = [("?", "bold accent"), (" keys  ", "dim"), ("q", "bold accent"), (" quit", "dim")]
    room = width - 18
    spans: list[Span] = []
    for key, does in keys:
        size = len(key) + len(does) + 3
        if size > room:
            break
        spans += [(key, "bold accent"), (f" {does}  ", "dim")]
        room -= size
    return spans, end
