"""What a run's time consists of: transfer that compute hid or that requests waited for, and the stages of a part."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kvctl.lab.bench.html import scale
from kvctl.lab.bench.html.bars import LONGEST_BESIDE, Bar, Group, Piece, bar_chart
from kvctl.lab.bench.html.figure import figure, figures, section, style_legend
from kvctl.lab.bench.html.latencies import time_unit
from kvctl.lab.bench.html.loads import Run, common_load, told
from kvctl.lab.bench.html.markup import Markup
from kvctl.lab.bench.html.numbers import lookup, milliseconds, significant
from kvctl.lab.bench.html.series import Entry, arranged
from kvctl.render import units

_STAGES = {
    "gate": "gate: waits for grant, watermark, lease",
    "gather": "gather: copied into staging",
    "post": "post: handed to the engine",
    "wire": "wire: until the engine reports it complete",
    "scatter": "scatter: copied into its pages",
}
# Loads whose times differ by more than this are drawn as shares: on one scale the small ones could not be seen.
_MOST_SPREAD = 8.0
_BARS_A_FIGURE = 30

_Parts = list[tuple[str, float, str]]  # style, length, tooltip


def exposed(runs: Sequence[Run]) -> Markup | None:
    """The section on exposed against hidden transfer; None where nothing was hidden: latency says it all."""
    known = [run for run in runs if lookup(run, "hidden_ms", "mean") is not None]
    known = [run for run in known if lookup(run, "exposed_ms", "mean") is not None]
    if not any(lookup(run, "hidden_ms", "mean") for run in known):
        return None

    def parts(run: Run) -> tuple[_Parts, str]:
        waited, hid = lookup(run, "exposed_ms", "mean") or 0.0, lookup(run, "hidden_ms", "mean") or 0.0
        whole = waited + hid
        told = f"{milliseconds(waited)} exposed, {milliseconds(hid)} hidden"
        note = f"{milliseconds(waited)} exposed" + (f", {units.percent(round(hid / whole, 2))} hidden" if whole else "")
        return [("hidden", hid, told), ("exposed", waited, told)], note

    lead = (
        "Transfer that ran beside compute costs nobody anything; what is left after the forward pass is what a "
        "request waits for. Means per room."
    )
    legend = style_legend([("hidden", "hidden behind compute"), ("exposed", "exposed")])
    return section("Exposed and hidden transfer", lead, legend, _stacked("Transfer per room", known, parts))


def stages(runs: Sequence[Run]) -> Markup | None:
    """The section on stages; None where no run has stage times."""
    known = [run for run in runs if any(lookup(run, "stages_us", stage, "p50") for stage in _STAGES)]
    if not known:
        return None

    def parts(run: Run) -> tuple[_Parts, str]:
        times = {stage: lookup(run, "stages_us", stage, "p50") or 0.0 for stage in _STAGES}
        told = [(stage, us, f"{stage} p50 {units.duration(us * 1e3)}") for stage, us in times.items()]
        return told, units.duration(sum(times.values()) * 1e3)

    lead = (
        "Median time of a part in each stage, end to end; on the right their sum. Parts run beside one another, so "
        "the sum is not a room's latency."
    )
    legend = style_legend(list(_STAGES.items()))
    return section("Where a part's time goes", lead, legend, _stacked("Stages of a part", known, parts))


def _stacked(title: str, runs: Sequence[Run], parts: Callable[[Run], tuple[_Parts, str]]) -> Markup:
    """Stacked bars of all runs: lengths where they compare, shares where they are too different."""
    wholes = [sum(length for _, length, _ in parts(run)[0]) for run in runs]
    some = [whole for whole in wholes if whole > 0]
    as_shares = not some or max(some) > _MOST_SPREAD * min(some)
    in_ms = 1.0 if title == "Transfer per room" else 1e-3
    unit, factor = time_unit(max(some, default=1.0) * in_ms)
    axis = (
        scale.shares("share of the time")
        if as_shares
        else scale.from_zero(max(some) * in_ms * factor, unit, significant)
    )
    drawn = []
    for groups in _columns(arranged(runs, LONGEST_BESIDE)):
        charted: list[Group] = []
        for heading, entries in groups:
            bars = []
            for entry in entries:
                found, note = parts(entry.run)
                whole = sum(length for _, length, _ in found) or 1.0
                per = 1 / whole if as_shares else in_ms * factor
                hint = f"{entry.series.label} · {told(entry.run)}"
                pieces = tuple(Piece(length * per, style, f"{hint}\n{told}") for style, length, told in found)
                bars.append(Bar(entry.label, pieces, note))
            charted.append((heading, bars))
        drawn.append(figure(title, common_load(runs), bar_chart(title, charted, axis)))
    return figures(*drawn)


_Groups = list[tuple[str, list[Entry]]]


def _columns(groups: _Groups) -> list[_Groups]:
    """The groups in figures side by side: pairs of about `_BARS_A_FIGURE` bars at most, no group torn apart."""
    total = sum(len(members) for _, members in groups)
    wanted = min(len(groups), 2 * math.ceil(total / (2 * _BARS_A_FIGURE)))
    columns: list[_Groups] = [[]]
    drawn = 0
    for each in groups:
        if columns[-1] and drawn >= len(columns) * total / wanted:
            columns.append([])
        columns[-1].append(each)
        drawn += len(each[1])
    return columns
