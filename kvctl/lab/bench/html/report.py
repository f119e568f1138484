"""The report page: headline, key figures and table of results; the charts come from `sections`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from kvctl.lab.bench.html.charts import Level
from kvctl.lab.bench.html.markup import Markup, joined, lookup, milliseconds, significant, tag
from kvctl.lab.bench.html.sections import (
    Run,
    busy_engines,
    exposed,
    latencies,
    load_text,
    rooflines,
    stages,
    throughput,
)
from kvctl.lab.bench.sglang_views import SERVERS
from kvctl.lab.bench.variants import pages_text
from kvctl.lab.bench.views import BENCH, DIMENSIONS, contestants, distinguishing, rounds_text, shape_words
from kvctl.render import units
from kvctl.render.view import Column, Kind, View, Width

_MAX_ROOFLINE_CARDS = 2
_TEXT_KINDS = (Kind.TEXT, Kind.FLAG, Kind.LIST, Kind.MAP)
_VERDICT_CLASSES = {"True": "good", "False": "bad"}


def render(document: Mapping[str, Any], command: str, started_at: str) -> str:
    """Returns the report as an HTML page, to be written as UTF-8; sections without data are left out.

    Args:
        document: Result of `kvctl bench --save`.
        command: Command line that was run.
        started_at: Start time as text, such as `2026-11-20 12:49:42 UTC`.
    """
    runs: Sequence[Run] = document["runs"]
    levels = rooflines(document)
    model, servers = document["shape"]["model"], "sides" in document
    if servers:
        title = f"Transfer backends of SGLang servers: {model}"
    else:
        over = " and ".join(_distinct(runs, "transport"))
        title = f"KV-cache transfer{f' of {model}' if model else ''} over {over}"
    lines = [tag("p", text, class_="what") for text in (_setup(document, runs), started_at)]
    top = tag("div", tag("h1", title), _verdict(document, runs), class_="top")
    body = tag(
        "main",
        tag("header", top, *lines, _cards(runs, levels)),
        _results(runs, SERVERS if servers else BENCH, document.get("turns", True)),
        throughput(runs, levels),
        busy_engines(runs),
        *latencies(runs),
        exposed(runs),
        stages(runs),
        _provenance(document, command),
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Markup(files("kvctl.lab.bench.html").joinpath("report.css").read_text(encoding="utf-8"))),
    )
    return joined(Markup("<!DOCTYPE html>\n"), tag("html", head, tag("body", body), lang="en"), "\n")


# ---- headline -------------------------------------------------------------------------------------------------------


def _setup(document: Mapping[str, Any], runs: Sequence[Run]) -> str:
    words = list(dict.fromkeys(f"prefill {run['prefill']} → decode {run['decode']}" for run in runs))
    words += shape_words(document["shape"])
    words += dict.fromkeys(pages_text(run) for run in runs)
    words.append(f"on {' and '.join(_distinct(runs, 'device'))}")
    rooms = sum(run["rooms"] for run in runs)
    words.append(f"{units.count(rooms)} rooms in {len(runs)} run{'s' * (len(runs) > 1)}")
    return " · ".join(words)


def _verdict(document: Mapping[str, Any], runs: Sequence[Run]) -> Markup:
    failed = sum(run.get("failed", 0) for run in runs)
    verified = document["verified"]
    if verified:
        compared = "all tokens equal" if "sides" in document else "every byte verified"
        return tag("p", f"✓ {compared}", class_="verdict good")
    if verified is False:
        more = f", {units.count(failed)} rooms failed" if failed else ""
        return tag("p", f"✗ NOT verified{more}", class_="verdict bad")
    return tag("p", "nothing was verified", class_="verdict unsure")


def _cards(runs: Sequence[Run], levels: Sequence[Level]) -> Markup | None:
    """Returns cards with the highest throughput, its share of the limits, the best speedup and the lowest latency.

    Only the speedup, which the rounds show, is one of a setting. None if no run has a throughput.
    """
    moving = [(lookup(run, "gb_per_s") or 0.0, run) for run in runs if lookup(run, "gb_per_s")]
    if not moving:
        return None
    rate, run = max(moving, key=lambda each: each[0])
    cards = [_card(f"{significant(rate)} GB/s", "highest throughput", load_text(run))]
    # The limits closest to the measured rate are the most informative.
    nearest = sorted(levels, key=lambda level: abs(math.log(rate / level.value)))[:_MAX_ROOFLINE_CARDS]
    for level in (level for level in levels if level in nearest):
        cards.append(_card(units.percent(rate / level.value), f"of {level.label}", "highest throughput"))
    names = contestants(runs)
    faster = [
        (ratio, name, run)
        for name, run in zip(names, runs, strict=True)
        if run.get("delta_significant") and (ratio := lookup(run, "delta_ratio"))
    ]
    if faster:
        # The change is that against the first run of the load.
        ratio, name, run = max(faster, key=lambda each: each[0])
        first = next(each for each, other in zip(names, runs, strict=True) if load_text(other) == load_text(run))
        times = f"{significant(1 + ratio)} \N{MULTIPLICATION SIGN}"
        cards.append(_card(times, f"{name} against {first}", f"throughput, {load_text(run)}"))
    timed = [(p50, run) for _, run in moving if (p50 := lookup(run, "latency_ms", "p50"))]
    if timed:
        p50, run = min(timed, key=lambda each: each[0])
        cards.append(_card(milliseconds(p50), "lowest median latency", load_text(run)))
    return tag("div", *cards, class_="cards")


def _card(value: str, name: str, detail: str) -> Markup:
    return tag("div", tag("strong", value), tag("span", name), tag("small", detail), class_="card")


def _distinct(runs: Sequence[Run], name: str) -> list[str]:
    return list(dict.fromkeys(str(run[name]) for run in runs))


# ---- the table of results -------------------------------------------------------------------------------------------


def _results(runs: Sequence[Run], view: View, turns: bool) -> Markup:
    """Returns the table of all runs with the columns of the terminal's table; columns without values are left out."""
    columns = [
        column for column in _columns(runs, view) if any(column.human(run) not in {units.UNKNOWN, ""} for run in runs)
    ]
    head = tag("tr", *(tag("th", column.title, scope="col", class_=_class(column)) for column in columns))
    body = [tag("tr", *(_cell(column, run) for column in columns)) for run in runs]
    whole = tag("table", tag("thead", head), tag("tbody", *body))
    notes = (tag("p", line) for line in rounds_text(runs, turns))
    return tag("section", tag("h2", "Results"), tag("div", whole, class_="table", tabindex="0"), *notes)


def _columns(runs: Sequence[Run], view: View) -> list[Column]:
    """Returns the columns of the terminal's table without the fields in which no runs differ, and those it lacks."""
    varied = (view.columns[0].name, *distinguishing(runs))
    columns = [column for column in view.columns if column.name in varied or column.name not in DIMENSIONS]
    known = {column.name for column in columns}
    return columns + [Column(name) for name in dict.fromkeys(varied) if name not in known]


def _cell(column: Column, run: Run) -> Markup:
    classes = [_class(column)]
    if column.styles is not None:
        classes.append(_VERDICT_CLASSES.get(str(column.value(run)), ""))
    return tag("td", column.human(run), class_=" ".join(filter(None, classes)))


def _class(column: Column) -> str:
    width = "extra" if column.width is Width.WIDE else ""
    return f"{'' if column.kind in _TEXT_KINDS else 'number'} {width}".strip()


# ---- provenance -----------------------------------------------------------------------------------------------------


def _provenance(document: Mapping[str, Any], command: str) -> Markup:
    """Returns the section with the command line and the environment."""
    listed = (
        tag("div", tag("dt", str(key)), tag("dd", text))
        for key, value in document["env"].items()
        if (text := _fact(value))
    )
    return tag("section", tag("h2", "How it was measured"), tag("pre", tag("code", command)), tag("dl", *listed))


def _fact(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(str(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return "" if value is None else str(value)
