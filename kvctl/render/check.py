"""Output of `kvctl check`: a monitoring plugin's text with performance data, rows, and Prometheus gauges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvctl.exit_codes import CheckState
from kvctl.health.measures import MEASURES_BY_NAME, Measure, Unit
from kvctl.health.thresholds import Threshold, human
from kvctl.health.verdict import Problem, Verdict, worst
from kvctl.render import palette
from kvctl.render.kinds import Kind
from kvctl.render.sanitize import one_line
from kvctl.render.view import Column, View, Width

CHECK = View(
    "check",
    (
        Column("check"),
        Column("state", kind=Kind.VERDICT, styles=palette.VERDICTS),
        Column("muted", kind=Kind.COUNT),
        Column("problems", kind=Kind.LIST),
        Column("values", kind=Kind.MAP, width=Width.WIDE),
    ),
)

_SUMMARY = ("agents", "ring", "active", "room-age")
_SUFFIX = {Unit.COUNT: "", Unit.SECONDS: "_seconds", Unit.RATIO: "_ratio", Unit.BYTES: "_bytes"}


def rows(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Returns one row per area; values are in seconds, ratios, bytes and counts."""
    return [
        {
            "check": verdict.area,
            "state": verdict.state.label,
            "muted": len(verdict.muted),
            "problems": [problem.text for problem in verdict.problems],
            "values": dict(verdict.values),
        }
        for verdict in verdicts
    ]


def plugin(name: str, verdicts: Sequence[Verdict], thresholds: Mapping[str, Threshold]) -> str:
    """Formats the output of a monitoring plugin: one line with performance data, then the remaining problems.

    Args:
        name: of the check; "all" is left out of the text.
        verdicts: verdict of each area.
        thresholds: by name of the measure.
    """
    state = worst(verdict.state for verdict in verdicts)
    problems = _each_once(verdicts)
    values = {name: value for verdict in verdicts for name, value in verdict.values.items()}
    first = problems[0].text if problems else _summary(values)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    title = "KVCTL" if name == "all" else f"KVCTL {name.upper()}"
    line = f"{title} {state.name} - {_plain(first)}{more}"
    performance = " ".join(_performance(MEASURES_BY_NAME[each], value, thresholds) for each, value in values.items())
    muted = Counter(finding.code for verdict in verdicts for finding in verdict.muted)
    long = [f"{problem.state.name}: {_plain(problem.text)}" for problem in problems[1:]]
    if muted:
        long.append(f"muted: {', '.join(f'{code} ({times})' for code, times in sorted(muted.items()))}")
    return "\n".join([f"{line} | {performance}", *long]) + "\n"


def unknown(text: str) -> str:
    """Returns the output of a check that could not be carried out."""
    return f"KVCTL {CheckState.UNKNOWN.name} - {_plain(text)}\n"


def _each_once(verdicts: Sequence[Verdict]) -> list[Problem]:
    """Returns the problems, worst first; an agent that does not answer is a problem of every area but listed once."""
    found = dict.fromkeys(problem for verdict in verdicts for problem in verdict.problems)
    return sorted(found, key=lambda problem: -problem.state.gravity)


def _summary(values: Mapping[str, float | None]) -> str:
    shown = [name for name in _SUMMARY if name in values] if "agents" in values and len(values) > 3 else list(values)
    if values.get("draining") and "draining" not in shown:
        shown = [*shown, "draining"]
    known = [(MEASURES_BY_NAME[name], values[name]) for name in shown if values[name] is not None]
    return ", ".join(f"{measure.name.replace('-', ' ')} {human(measure, value)}" for measure, value in known) or "well"


def _performance(measure: Measure, value: float | None, thresholds: Mapping[str, Threshold]) -> str:
    """Formats performance data as the plugin guidelines require: `'ring'=24.4%;80;95;0;`; U is unknown.

    There is no maximum, because ring use can exceed 100 % while regions are granted ahead.
    """
    threshold = thresholds.get(measure.name, Threshold())
    scale = 100 if measure.unit is Unit.RATIO else 1
    # A plugin's range contains the acceptable values: "4:" warns below 4.
    colon = ":" if measure.least else ""
    warn, crit = (
        "" if limit is None else f"{_number(limit * scale)}{colon}" for limit in (threshold.warn, threshold.crit)
    )
    now = "U" if value is None else f"{_number(value * scale)}{measure.unit.value}"
    return f"'{measure.name}'={now};{warn};{crit};0;"


def _number(value: float) -> str:
    return f"{value:.6f}".rstrip("0").rstrip(".")


def _plain(text: str) -> str:
    """Formats text as one safe line without the bar, which would start performance data."""
    return one_line(text).replace("|", "/")


def exposition(verdicts: Sequence[Verdict]) -> str:
    """Formats the verdicts as Prometheus gauges, for node_exporter's textfile collector."""
    found = Counter(
        (problem.code, problem.state.label) for verdict in verdicts for problem in verdict.problems if problem.code
    )
    lines = _gauge(
        "kvctl_check_state",
        "0 ok, 1 warning, 2 critical, 3 unknown.",
        [(f'check="{verdict.area}"', verdict.state.value) for verdict in verdicts],
    )
    lines += _gauge(
        "kvctl_check_muted",
        "Findings that are muted.",
        [(f'check="{each.area}"', len(each.muted)) for each in verdicts],
    )
    lines += _gauge(
        "kvctl_check_findings",
        "Findings by code.",
        [(f'code="{code}",severity="{state}"', times) for (code, state), times in sorted(found.items())],
    )
    for verdict in verdicts:
        for name, value in verdict.values.items():
            measure = MEASURES_BY_NAME[name]
            text = measure.help[0].upper() + measure.help[1:] + "."
            family = f"kvctl_check_{name.replace('-', '_')}{_SUFFIX[measure.unit]}"
            lines += _gauge(family, text, [] if value is None else [("", value)])
    return "".join(f"{line}\n" for line in lines)


def _gauge(name: str, text: str, samples: Sequence[tuple[str, float]]) -> list[str]:
    if not samples:
        return []
    shown = [f"{name}{{{labels}}} {value:g}" if labels else f"{name} {value:g}" for labels, value in samples]
    return [f"# HELP {name} {text}", f"# TYPE {name} gauge", *shown]
