"""Formats findings as rows and as paragraphs."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvctl.client.names import few, natural_key
from kvctl.health.finding import Finding, Severity, counted
from kvctl.render import palette, units
from kvctl.render.report import Block, Grid, Line, Span, Text
from kvctl.render.view import Column, Kind, Row, View, Width

_LABEL = 10
_MAX_WIDTH = 110
_MAX_IN_SHORT = 2
_MIN_FOLDED = 5
_MAX_CAUSES = 2
_MAX_HOSTS = 4
# Names of agents, and numbers with their units.
_VARYING = re.compile(r"[\w.@:#\[\]-]*\d[\w.@:#\[\]-]*(?: [µmn]?s| [KMGT]?i?B)?")


def _gigabytes(value: float) -> str:
    return f"{units.three_digits(value)} GB/s"


_HUMAN = {"_ns": units.duration, "_bytes": units.size, "_ratio": units.percent, "_gb_per_s": _gigabytes}

HEALTH = View(
    "health",
    (
        Column("severity", Kind.VERDICT, help="info, warning or critical.", styles=palette.VERDICTS),
        Column("code", header="CODE"),
        Column("subject"),
        Column("since", Kind.DURATION, Width.NORMAL),
        Column("cause", Kind.SENTENCE),
        Column("agents", Kind.LIST, Width.WIDE),
        Column("evidence", Kind.MAP, Width.WIDE, path=lambda row: row["evidence"]),
        Column("remedy", Kind.SENTENCE, Width.WIDE),
    ),
    identity=("code", "subject"),
    empty="nothing found",
)


def row(finding: Finding) -> dict[str, Any]:
    """Returns the row of HEALTH for one finding."""
    return {
        "severity": finding.severity.label,
        "code": finding.code,
        "subject": finding.subject,
        "agents": list(finding.agents),
        "since_ns": finding.since_ns,
        "cause": finding.cause,
        "remedy": finding.remedy,
        "evidence": dict(finding.evidence),
    }


def folded(rows: Iterable[Row], hosts: Mapping[str, str]) -> list[Row]:
    """Folds five or more findings of one code and severity into one, which names the hosts; keeps the order.

    The cause of such a row begins with the most frequent one, apart from names and numbers; the remedy is its remedy.
    """
    alike: dict[tuple[str, str], list[Row]] = {}
    for each in rows:
        alike.setdefault((each["severity"], each["code"]), []).append(each)
    found: list[Row] = []
    for same in alike.values():
        found += [_merged(same, hosts)] if len(same) >= _MIN_FOLDED and all(each["agents"] for each in same) else same
    return found


def without_names(text: str) -> str:
    """Returns the text of a cause without that in which causes of one kind differ: names of agents, and numbers."""
    return _VARYING.sub("", text)


def _merged(same: Sequence[Row], hosts: Mapping[str, str]) -> Row:
    causes: dict[str, list[Row]] = {}
    for each in same:
        causes.setdefault(without_names(each["cause"]), []).append(each)
    frequent = sorted(causes.values(), key=len, reverse=True)
    texts = [f"{len(each)} such as {each[0]['subject']}: {each[0]['cause']}" for each in frequent[:_MAX_CAUSES]]
    others = sum(map(len, frequent[_MAX_CAUSES:]))
    agents = list(dict.fromkeys(name for each in same for name in each["agents"]))
    places = sorted({hosts[name] for name in agents if hosts.get(name)}, key=natural_key)
    where = f" on {few(places, _MAX_HOSTS, 'hosts')}" if len(set(hosts.values())) > 1 and places else ""
    ages = [each["since_ns"] for each in same if each["since_ns"] is not None]
    return {
        **frequent[0][0],
        "subject": f"{counted(len(agents), 'agent')}{where}" if agents else f"{len(same)} findings",
        "agents": agents,
        "since_ns": max(ages, default=None),
        "cause": "; ".join(texts) + (f"; {others} with other causes" if others else ""),
        "evidence": {"findings": len(same), "agents": len(agents)},
        "count": len(same),
    }


def overview(
    rows: Sequence[Row], agents: int, silent: int, codes: int, ignored: int, hosts: Mapping[str, str] | None = None
) -> list[Block]:
    """Formats the headline and a table of the findings.

    Args:
        silent: number of agents that did not answer, or not everything.
    """
    head = [headline(rows, not silent), (f"   {counted(agents, 'agent')}, {counted(codes, 'code')} examined", "dim")]
    if silent:
        head.append((f", {silent} not answering", "bold red"))
    if ignored:
        head.append((f", {ignored} ignored", "yellow"))
    if not rows:
        return [Text([head])]
    hint = "kvctl doctor shows evidence, remedies and the next command"
    return [Text([head]), Grid(HEALTH, folded(rows, hosts or {})), Text([[(hint, "dim")]])]


def headline(rows: Iterable[Row], complete: bool) -> Span:
    """Counts the findings by severity, as in `✗ 1 critical, 2 warnings`, in the style of the highest severity.

    Without a warning, a reading that is not complete, because an agent did not answer, is no proof that all is well.
    """
    counts = Counter(str(each["severity"]) for each in rows)
    worst = max(counts, key=lambda label: Severity[label.upper()], default="ok")
    parts = [
        f"{counts[severity.label]} {severity.label}"
        + ("s" if severity is Severity.WARNING and counts["warning"] > 1 else "")
        for severity in sorted(Severity, reverse=True)
        if counts[severity.label]
    ]
    if worst in {"ok", Severity.INFO.label} and not complete:
        worst, parts = "unknown", ["incomplete", *parts]
    return (f"{palette.VERDICT_GLYPHS[worst]} {', '.join(parts) or 'healthy'}", palette.VERDICTS[worst])


def in_short(findings: Sequence[Finding], complete: bool) -> list[Span]:
    """Formats the first two codes of problems and the number of further problems, for a line with other information."""
    bad = [each for each in findings if each.severity > Severity.INFO]
    spans: list[Span] = []
    if not bad:
        spans = [("✓ no problem in one reading", palette.VERDICTS["ok"])] if complete else [headline((), complete)]
    if not bad and findings:
        spans.append((f", {len(findings)} info (kvctl health)", palette.VERDICTS["info"]))
    alike: dict[tuple[Severity, str], list[Finding]] = {}
    for each in bad:
        alike.setdefault((each.severity, each.code), []).append(each)
    for (severity, code), same in list(alike.items())[:_MAX_IN_SHORT]:
        subject = same[0].subject if len(same) == 1 else f"({len(same)})"
        spans.append((f"{palette.VERDICT_GLYPHS[severity.label]} {code} {subject}", palette.VERDICTS[severity.label]))
        spans.append(("  ", ""))
    more = sum(map(len, list(alike.values())[_MAX_IN_SHORT:]))
    if more:
        spans.append((f"and {more} more (kvctl health)  ", ""))
    return spans


def paragraph(row: Row, width: int, number: int | None = None) -> list[Line]:
    """Formats one finding in full, preceded by `number` if it is given."""
    style = palette.VERDICTS.get(row["severity"], "")
    title: list[Span] = [
        (f"{number}. " if number else "", "bold"),
        (f"{palette.VERDICT_GLYPHS.get(row['severity'], '?')} {row['severity']}", style),
        (f"  {row['code']}", "bold"),
        (f"  {row['subject']}", ""),
    ]
    if row["since_ns"] is not None:
        title.append((f"  for {units.duration(row['since_ns'])}", "dim"))
    return [
        title,
        *labelled("evidence", ", ".join(figures(row["evidence"])), width),
        *labelled("cause", row["cause"], width),
        *labelled("remedy", row["remedy"], width),
    ]


def labelled(label: str, text: str, width: int, indent: int = _LABEL) -> list[Line]:
    """Formats a text next to its label, wrapped with a hanging indent; returns no lines for an empty text."""
    wrapped = textwrap.wrap(
        " ".join(text.split()),
        max(20, min(width, _MAX_WIDTH) - indent - 2),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [
        [(f"  {label if not number else '':<{indent}}", "dim"), (piece, "")] for number, piece in enumerate(wrapped)
    ]


def figures(evidence: Mapping[str, Any]) -> list[str]:
    """Formats the evidence of a finding for people, as in `age 41 s`, `held 2 MiB`; omits empty values."""
    return [_figure(name, value) for name, value in evidence.items() if value not in (None, "", [], (), {})]


def _figure(name: str, value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"{_words(name)} {' '.join(str(each) for each in value)}"
    if isinstance(value, Mapping):
        return f"{_words(name)} {' '.join(f'{key}={each}' for key, each in value.items())}"
    if isinstance(value, bool):
        return f"{_words(name)}: {'yes' if value else 'no'}"
    if name == "pid" or not isinstance(value, int | float):
        return f"{_words(name)} {value}"
    for suffix, human in _HUMAN.items():
        if name.endswith(suffix):
            return f"{_words(name.removesuffix(suffix))} {human(value)}"
    number = f"{value:,}" if isinstance(value, int) else units.three_digits(value)
    if name.endswith("_total"):
        noun = _words(name.removesuffix("_total"))
        return f"{number} {noun.removesuffix('s') if value == 1 else noun}"
    return f"{_words(name)} {number}"


def _words(name: str) -> str:
    return name.replace("_", " ")
