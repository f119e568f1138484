"""Contents of the lines above and below every panel: fleet and health, list of views, problems, keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvctl.client.fleet import Survey
from kvctl.render import findings, palette, units
from kvctl.render.report import Line, Span
from kvctl.tui import VIEWS
from kvctl.tui.store import Store

_SECOND_NS = 1_000_000_000
_MAX_NAMED = 3
Ends = tuple[Line, Line]
"""Texts at the left and the right end of a line."""


@dataclass(frozen=True, slots=True)
class Mode:
    """How the app runs.

    Attributes:
        paused_ns: time since the user paused updates; None if updates are not paused.
        source: name of the recording; "" for a live fleet.
        no_agents: returns the reason why a survey has no agents, as text for the user.
    """

    paused_ns: int | None = None
    source: str = ""
    no_agents: Callable[[Survey], str] = lambda survey: "no agent found"


def top(store: Store, mode: Mode) -> Ends:
    """Returns the first line of the screen: number of agents, health and time."""
    spans: list[Span] = [("kvctl top  ", "bold accent")]
    for role in ("prefill", "decode"):
        number = sum(agent.role == role and agent.ended_ns is None for agent in store.agents.values())
        if number:
            spans += [(str(number), "bold"), (f" {role}  ", palette.ROLES[role])]
    silent = len(store.silent) + len(store.never_heard)
    if silent:
        spans.append((f"{silent} silent  ", "bold red"))
    if ended := sum(agent.ended_ns is not None for agent in store.agents.values()):
        spans.append((f"{ended} ended  ", "yellow"))
    if store.findings is not None and store.answering:
        spans.append(findings.headline([findings.row(each) for each in store.findings], store.complete))
    at = units.clock_seconds(store.now_ns) if store.now_ns else "--:--:--"
    return spans, [(at, "bold")]


def tabs(view: str, path: Sequence[str]) -> Ends:
    """Returns the line of numbered views, with `view` marked, and `path`, the titles of the panels opened on it.

    If there are such panels, the other views have only their numbers, so that the titles fit.
    """
    spans: list[Span] = []
    for number, name in enumerate(VIEWS, 1):
        text = f"{number}" if path and name != view else f"{number} {name}"
        spans += [(f" {text} ", "reverse bold")] if name == view else [(f" {text}", "dim")]
    return [*spans, *((f" / {title}", "bold accent") for title in path)], []


def banner(store: Store, mode: Mode) -> list[Ends]:
    """Returns lines about conditions that affect the data on screen: a recording, a pause, errors, silent agents."""
    lines: list[Ends] = []
    position = store.position
    if position is not None:
        playing = position.playing and mode.paused_ns is None
        state = "playing" if playing else "paused" if position.index < position.count - 1 else "at its end"
        text = f" {'▶' if playing else '■'} {mode.source}: snapshot {position.index + 1} of {position.count}, {state} "
        lines.append(([(text, "bold yellow"), ("  [ ] seek, space plays and pauses", "dim")], []))
    elif mode.paused_ns is not None:
        age = units.duration(mode.paused_ns // _SECOND_NS * _SECOND_NS)
        lines.append(([(f" ■ paused: the data is {age} old ", "bold yellow"), ("  space resumes", "dim")], []))
    if store.problem:
        lines.append(([(f"✗ {store.problem}", "bold red")], []))
    elif store.survey is not None and not store.agents and not store.never_heard:
        lines.append(([(f"✗ {mode.no_agents(store.survey)}", "bold yellow")], []))
    silent: list[Ends] = [
        ([(f"○ {fault.agent}: " if fault.agent else "○ ", "bold yellow"), (fault.message, "yellow")], [])
        for fault in store.never_heard
    ]
    for agent in store.silent:
        age = units.duration((store.stale_ns(agent.name) or 0) // _SECOND_NS * _SECOND_NS)
        silent.append(([(f"○ {agent.name} silent for {age}: ", "bold yellow"), (agent.trouble, "yellow")], []))
    lines += silent[:_MAX_NAMED]
    if len(silent) > _MAX_NAMED:
        lines.append(([(f"○ and {len(silent) - _MAX_NAMED} more do not answer", "bold yellow")], []))
    return lines


def footer(keys: Sequence[tuple[str, str]], width: int) -> Ends:
    """Returns the last line of the screen: as many of `keys` (label, name) as fit, and the keys for help and quit."""
    end: list[Span] = [("?", "bold accent"), (" keys  ", "dim"), ("q", "bold accent"), (" quit", "dim")]
    left = width - 18
    spans: list[Span] = []
    for key, name in keys:
        size = len(key) + len(name) + 3
        if size > left:
            break
        spans += [(key, "bold accent"), (f" {name}  ", "dim")]
        left -= size
    return spans, end
