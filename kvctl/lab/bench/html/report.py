"""The report page: headline, key figures and table of results; the charts come from `plots` and `waterfall`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

from kvctl.lab.bench.html.charts import Level
from kvctl.lab.bench.html.markup import Markup, joined, lookup, milliseconds, significant, tag, times
from kvctl.lab.bench.html.plots import busy_engines, exposed, latencies, rings, rooflines, stages, throughput
from kvctl.lab.bench.html.series import DIMENSIONS, Run, Series, load_of, load_text, series_of, varied_dimensions
from kvctl.lab.bench.html.waterfall import waterfalls
from kvctl.lab.bench.timelines import ReportData
from kvctl.lab.bench.variants import pages_text
from kvctl.lab.bench.views import BENCH, rounds_text
from kvctl.render import units
from kvctl.render.view import Column, Kind, Width

_MAX_ROOFLINE_CARDS = 2
_TEXT_KINDS = (Kind.TEXT, Kind.FLAG, Kind.LIST, Kind.MAP)
_VERDICT_CLASSES = {"True": "good", "False": "bad", "PASS": "good", "FAIL": "bad"}


def render(report: ReportData) -> str:
    """Returns the report as an HTML page, to be written as UTF-8; sections without data are left out.

    Args:
        report: Data of the report; `{"document": json.load(file)}` suffices for a saved result.
    """
    document = report["document"]
    found = document.get("runs")
    runs: Sequence[Run] = [run for run in found if isinstance(run, Mapping)] if isinstance(found, list | tuple) else []
    levels = rooflines(document)
    title = _title(document, runs)
    body = tag(
        "main",
        _header(title, report, runs, levels),
        _results(runs),
        throughput(runs, levels),
        busy_engines(runs),
        latencies(runs),
        exposed(runs),
        waterfalls(report.get("waterfalls", ())),
        stages(runs),
        rings(report.get("rings", ())),
        _provenance(report),
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


def _header(title: str, report: ReportData, runs: Sequence[Run], levels: Sequence[Level]) -> Markup:
    """Returns the head of the page: title, setup, verdict and key figures."""
    document = report["document"]
    lines = [tag("p", text, class_="what") for text in (_setup(document, runs), report.get("started_at", "")) if text]
    top = tag("div", tag("h1", title), _verdict(document, runs), class_="top")
    return tag("header", top, *lines, _cards(runs, levels))


def _title(document: Mapping[str, Any], runs: Sequence[Run]) -> str:
    transports = _distinct(runs, "transport")
    model = _shape(document).get("model")
    return (
        "KV-cache transfer"
        + (f" of {model}" if model else "")
        + (f" over {' and '.join(transports)}" if transports else "")
    )


def _shape(document: Mapping[str, Any]) -> Mapping[str, Any]:
    shape = document.get("shape")
    return shape if isinstance(shape, Mapping) else {}


def _setup(document: Mapping[str, Any], runs: Sequence[Run]) -> str:
    words = [f"preset {document['preset']}"] if document.get("preset") else []
    layouts = dict.fromkeys((run.get("prefill"), run.get("decode")) for run in runs)
    words += [f"prefill {prefill} → decode {decode}" for prefill, decode in layouts if prefill and decode]
    words += _geometry(_shape(document))
    words += dict.fromkeys(pages_text(run) for run in runs if "page_size" in run)
    if devices := _distinct(runs, "device"):
        words.append(f"on {' and '.join(devices)}")
    rooms = sum(int(lookup(run, "rooms") or 0) for run in runs)
    if rooms:
        words.append(f"{units.count(rooms)} rooms in {len(runs)} run{'s' * (len(runs) > 1)}")
    return " · ".join(words)


def _geometry(shape: Mapping[str, Any]) -> Iterator[str]:
    """Yields descriptions of the model's layers and heads, as far as the document has them."""
    if "layers" in shape:
        yield f"{shape['layers']} layers"
    if shape.get("kind") == "mla":
        yield f"latents of {shape.get('head_dim')} {shape.get('dtype', '')}".rstrip()
    elif "kv_heads" in shape and "head_dim" in shape:
        dims = dict.fromkeys((shape["head_dim"], shape.get("v_head_dim", shape["head_dim"])))
        yield f"{shape['kv_heads']} KV heads of {' and '.join(map(str, dims))} {shape.get('dtype', '')}".rstrip()


def _verdict(document: Mapping[str, Any], runs: Sequence[Run]) -> Markup:
    failed = sum(int(lookup(run, "failed") or 0) for run in runs)
    verified = document.get("verified")
    if verified is True:
        return tag("p", "✓ every byte verified", class_="verdict good")
    if verified is False:
        more = f", {units.count(failed)} rooms failed" if failed else ""
        return tag("p", f"✗ NOT verified{more}", class_="verdict bad")
    return tag("p", "nothing was verified", class_="verdict unsure")


def _cards(runs: Sequence[Run], levels: Sequence[Level]) -> Markup | None:
    """Returns cards with the highest throughput, its share of the limits, the best speedup and the lowest latency.

    Only the speedup, which the rounds show, is one of a setting. None if no run has a throughput.
    """
    moving = [(each, run) for each in series_of(runs) for run in each.runs if lookup(run, "gb_per_s")]
    if not moving:
        return None
    run = max((each for _, each in moving), key=lambda each: lookup(each, "gb_per_s") or 0.0)
    rate = lookup(run, "gb_per_s") or 0.0
    cards = [_card(f"{significant(rate)} GB/s", "highest throughput", load_text(run))]
    # The limits closest to the measured rate are the most informative.
    nearest = sorted(levels, key=lambda level: abs(math.log(rate / level.value)))[:_MAX_ROOFLINE_CARDS]
    for level in (level for level in levels if level in nearest):
        cards.append(_card(units.percent(rate / level.value), f"of {level.label}", "highest throughput"))
    speedup = _speedup(moving)
    if speedup is not None:
        cards.append(speedup)
    timed = [each for _, each in moving if lookup(each, "latency_ms", "p50")]
    if timed:
        run = min(timed, key=lambda each: lookup(each, "latency_ms", "p50") or 0.0)
        p50 = milliseconds(lookup(run, "latency_ms", "p50"))
        cards.append(_card(p50, "lowest median latency", load_text(run)))
    return tag("div", *cards, class_="cards")


def _speedup(runs: Sequence[tuple[Series, Run]]) -> Markup | None:
    """Returns a card with the largest speedup over the first run of the same load that the rounds show; None without.

    The table's Δ columns refer to the same first run.
    """
    found: list[tuple[float, Series, Series, Run]] = []
    for series, run in runs:
        first, base = next(each for each in runs if load_of(each[1]) == load_of(run))
        if first is not series and run.get("delta_significant"):
            found.append(((lookup(run, "gb_per_s") or 0.0) / (lookup(base, "gb_per_s") or 1.0), series, first, run))
    if not found:
        return None
    factor, series, first, run = max(found, key=lambda each: each[0])
    return _card(times(factor), f"{series.label} against {first.label}", f"throughput, {load_text(run)}")


def _card(value: str, name: str, detail: str) -> Markup:
    return tag("div", tag("strong", value), tag("span", name), tag("small", detail), class_="card")


def _distinct(runs: Sequence[Run], name: str) -> list[str]:
    return list(dict.fromkeys(str(run[name]) for run in runs if run.get(name) not in (None, "")))


# ---- the table of results -------------------------------------------------------------------------------------------


def _results(runs: Sequence[Run]) -> Markup | None:
    """Returns the table of all runs with the columns of the terminal's table; columns without values are left out."""
    if not runs:
        return None
    columns = [
        column for column in _columns(runs) if any(_text(column, run) not in {units.UNKNOWN, ""} for run in runs)
    ]
    head = tag("tr", *(tag("th", column.title, scope="col", class_=_class(column)) for column in columns))
    body = [tag("tr", *(_cell(column, run) for column in columns)) for run in runs]
    whole = tag("table", tag("thead", head), tag("tbody", *body))
    notes = (tag("p", line) for line in rounds_text(runs))
    return tag("section", tag("h2", "Results"), tag("div", whole, class_="table", tabindex="0"), *notes)


def _columns(runs: Sequence[Run]) -> Iterator[Column]:
    """Yields the columns of the terminal's table, with the fields in which the runs differ after the path."""
    declared = {column.name: column for column in BENCH.columns}
    for column in BENCH.columns:
        if column.name not in DIMENSIONS or column.name == "path":
            yield column
        if column.name == "path":
            apart = (name for name in varied_dimensions(runs) if name != "path")
            # Shown in print, too, where wide columns are left out.
            yield from (replace(declared.get(name, Column(name)), width=Width.CORE) for name in apart)
        if column.name == "tokens" and len({run.get("ratio") for run in runs}) > 1:
            yield Column("ratio", kind=Kind.NUMBER, header="TRANSFER : COMPUTE")


def _text(column: Column, run: Run) -> str:
    try:
        return column.human(run)
    except (KeyError, TypeError, ValueError):
        return units.UNKNOWN  # the document is older than the column


def _cell(column: Column, run: Run) -> Markup:
    classes = [_class(column)]
    if column.styles is not None:
        classes.append(_VERDICT_CLASSES.get(str(column.value(run)), ""))
    return tag("td", _text(column, run), class_=" ".join(filter(None, classes)))


def _class(column: Column) -> str:
    width = "extra" if column.width is Width.WIDE else ""
    return f"{'' if column.kind in _TEXT_KINDS else 'number'} {width}".strip()


# ---- provenance -----------------------------------------------------------------------------------------------------


def _provenance(report: ReportData) -> Markup | None:
    """Returns the section with the command line, the traffic and the environment; None if none of them is known."""
    found = (report["document"].get(name) for name in ("traffic", "env"))
    facts = [(str(key), _fact(value)) for known in found if isinstance(known, Mapping) for key, value in known.items()]
    listed = joined(*(tag("div", tag("dt", key), tag("dd", value)) for key, value in facts if value))
    command = report.get("command")
    if not listed and not command:
        return None
    return tag(
        "section",
        tag("h2", "How it was measured"),
        tag("pre", tag("code", command)) if command else None,
        tag("dl", listed) if listed else None,
    )


def _fact(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(str(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return "" if value is None else str(value)
