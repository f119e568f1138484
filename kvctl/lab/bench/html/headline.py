"""What a reader should take away before any plot: what was run, whether every byte verified, and how fast it was."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvctl.lab.bench.html.chart import Level
from kvctl.lab.bench.html.data import ReportData
from kvctl.lab.bench.html.loads import Run, same_load, told
from kvctl.lab.bench.html.markup import Markup, joined, tag
from kvctl.lab.bench.html.numbers import lookup, milliseconds, significant, times
from kvctl.lab.bench.html.series import Series, sort_out
from kvctl.render import units

_FLOORS = 2


def headline(report: ReportData, runs: Sequence[Run], levels: Sequence[Level]) -> Markup:
    """Title, what was run, the verdict, and the key figures."""
    document = report["document"]
    lines = [tag("p", text, class_="what") for text in (_what(document, runs), report.get("started_at", "")) if text]
    return tag(
        "header",
        tag(
            "div",
            tag("h1", report.get("title") or default_title(document, runs)),
            _verdict(document, runs),
            class_="top",
        ),
        *lines,
        _figures(runs, levels),
    )


def default_title(document: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """A title made of what the document says."""
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


def _what(document: Mapping[str, Any], runs: Sequence[Run]) -> str:
    shape = _shape(document)
    words = [f"preset {document['preset']}"] if document.get("preset") else []
    layouts = dict.fromkeys((run.get("prefill"), run.get("decode")) for run in runs)
    words += [f"prefill {prefill} → decode {decode}" for prefill, decode in layouts if prefill and decode]
    words += _geometry(shape)
    for name, text in (("page_size", "pages of {}"), ("device", "on {}")):
        values = _distinct(runs, name)
        if values:
            words.append(text.format(" and ".join(values)))
    rooms = sum(int(lookup(run, "rooms") or 0) for run in runs)
    if rooms:
        words.append(f"{units.count(rooms)} rooms in {len(runs)} run{'s' * (len(runs) > 1)}")
    return " · ".join(words)


def _geometry(shape: Mapping[str, Any]) -> Iterator[str]:
    """The model's KV, of which an older document may say less."""
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


def _figures(runs: Sequence[Run], levels: Sequence[Level]) -> Markup | None:
    series = sort_out(runs)
    moving = [(each, run) for each in series for run in each.runs if lookup(run, "gb_per_s")]
    if not moving:
        return None
    fastest, run = max(moving, key=lambda each: lookup(each[1], "gb_per_s") or 0.0)
    rate = lookup(run, "gb_per_s") or 0.0
    cards = [_card(f"{significant(rate)} GB/s", "best throughput", f"{fastest.label}, {told(run)}")]
    # Of many floors those that say most: neither a hundredth of what was reached nor a hundred times as much.
    nearest = sorted(levels, key=lambda level: abs(math.log(rate / level.value)))[:_FLOORS]
    for level in (level for level in levels if level in nearest):
        # A floor's name ends in its own figure: "one memcpy 12.3 GB/s".
        cards.append(_card(units.percent(rate / level.value), f"of {level.label}", "best throughput"))
    speedup = _speedup(moving)
    if speedup is not None:
        cards.append(speedup)
    timed = [(each, run) for each, run in moving if lookup(run, "latency_ms", "p50")]
    if timed:
        quickest, run = min(timed, key=lambda each: lookup(each[1], "latency_ms", "p50") or 0.0)
        p50 = milliseconds(lookup(run, "latency_ms", "p50"))
        cards.append(_card(p50, "lowest median latency", f"{quickest.label}, {told(run)}"))
    return tag("div", *cards, class_="cards")


def _speedup(runs: Sequence[tuple[Series, Run]]) -> Markup | None:
    """The largest factor over what was measured first of the same load, which is what Δ means in the table too."""
    found: list[tuple[float, Series, Series, Run]] = []
    for series, run in runs:
        first, base = next(each for each in runs if same_load(each[1], run))
        if first is not series:
            found.append(((lookup(run, "gb_per_s") or 0.0) / (lookup(base, "gb_per_s") or 1.0), series, first, run))
    if not found:
        return None
    factor, series, first, run = max(found, key=lambda each: each[0])
    return _card(times(factor), f"{series.label} against {first.label}", f"throughput, {told(run)}")


def _card(value: str, what: str, detail: str) -> Markup:
    return tag("div", tag("strong", value), tag("span", what), tag("small", detail), class_="card")


def _distinct(runs: Sequence[Run], name: str) -> list[str]:
    return list(dict.fromkeys(str(run[name]) for run in runs if run.get(name) not in (None, "")))


def provenance(report: ReportData) -> Markup | None:
    """How to run it again, and on what it was run; None where nobody said."""
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
