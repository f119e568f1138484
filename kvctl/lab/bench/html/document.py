"""Puts the page together: one file, no network, no script; light or dark as the reader's system is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files

from kvctl.lab.bench.html.data import ReportData
from kvctl.lab.bench.html.headline import default_title, headline, provenance
from kvctl.lab.bench.html.latencies import latencies
from kvctl.lab.bench.html.loads import Run
from kvctl.lab.bench.html.markup import Markup, joined, tag
from kvctl.lab.bench.html.rates import floors, throughput
from kvctl.lab.bench.html.rings import rings
from kvctl.lab.bench.html.shares import exposed, stages
from kvctl.lab.bench.html.table import results
from kvctl.lab.bench.html.waterfall import waterfalls


def render(report: ReportData) -> str:
    """The page; a section without data is not there.

    Args:
        report: a saved document, and what else is known. `{"document": json.load(file)}` is enough.

    Returns:
        A whole HTML document, to be written as UTF-8.
    """
    document = report["document"]
    runs = _runs(document.get("runs"))
    levels = floors(document)
    body = tag(
        "main",
        headline(report, runs, levels),
        results(runs),
        throughput(runs, levels),
        latencies(runs),
        exposed(runs),
        waterfalls(report.get("waterfalls", ())),
        stages(runs),
        rings(report.get("rings", ())),
        provenance(report),
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="color-scheme", content="light dark"),
        tag("title", report.get("title") or default_title(document, runs)),
        tag("style", _style()),
    )
    return joined(Markup("<!DOCTYPE html>\n"), tag("html", head, tag("body", body), lang="en"), "\n")


def _runs(found: object) -> Sequence[Run]:
    return [run for run in found if isinstance(run, Mapping)] if isinstance(found, list | tuple) else []


def _style() -> Markup:
    return Markup(files("kvctl.lab.bench.html").joinpath("report.css").read_text(encoding="utf-8"))
