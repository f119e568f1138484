"""View of layer groups and its waterfall: durations of the stages, and the share of transfer time hidden by compute.

`ready` is the time since the first layer group of the chunk was ready; every other stage begins when the previous one
ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvctl.render import units
from kvctl.render.bars import EXPOSED, HIDDEN, STAGE_GLYPHS, legend, segments, split
from kvctl.render.report import Line, Span
from kvctl.render.view import Column, Kind, Row, View, Width
from kvctl_agent.contract.choices import PIPELINED, REASONS
from kvctl_agent.contract.states import STAGES


def hidden_share(row: Row) -> float | None:
    """Returns the share of the transfer time that was hidden by compute; None if unknown."""
    exposed, overlapped = row.get("exposed_ns"), row.get("overlapped_ns")
    if exposed is None or overlapped is None or exposed + overlapped == 0:
        return None
    return float(overlapped / (exposed + overlapped))


_STAGES = {
    "ready": "time from the first layer group of the chunk being ready until this part was ready",
    "gate": "wait for a grant and the watermark of the decode rank's ring",
    "queue": "wait for the control loop",
    "gather": "copy into the staging buffer",
    "post": "posting the write to the transfer engine",
    "wire": "time until the transfer engine reported completion",
    "arrive": "time until the decode rank received the notification",
    "scatter": "copy from the ring into the pages",
}


def _stage(stage: str, quantile: str, label: str, width: Width = Width.WIDE, header: str = "") -> Column:
    path = f"stages.{stage}.{quantile}_ns"
    text = f"{label} per part: {_STAGES[stage]}."
    return Column(f"{stage}_{quantile}", Kind.DURATION, width, text, path=path, header=header)


def _median(stage: str) -> Column:
    return _stage(stage, "p50", "Median", Width.NORMAL if stage in {"ready", "queue"} else Width.CORE, stage.upper())


LAYERS = View(
    "layers",
    (
        Column("agent"),
        Column("layers", Kind.LAYERS),
        Column("path", width=Width.NORMAL, help="Transfer path of the parts: bulk, slice, staged or direct."),
        Column("parts", Kind.COUNT, Width.NORMAL, "Measured parts."),
        Column("bytes", Kind.BYTES, Width.NORMAL, "Bytes of the measured parts."),
        *map(_median, STAGES),
        Column("exposed", Kind.DURATION, Width.NORMAL, "Mean time of a part after the end of the forward."),
        Column(
            "hidden",
            Kind.DURATION,
            Width.NORMAL,
            "Mean time of a part before the end of the forward.",
            path="overlapped_ns",
        ),
        Column("share", Kind.RATIO, Width.NORMAL, "Share of the transfer time that compute hid.", path=hidden_share),
        *(_stage(stage, quantile, f"{quantile[1:]}th percentile") for stage in STAGES for quantile in ("p90", "p99")),
    ),
    identity=("agent", "layers", "path"),
    sort=("agent", "layers"),
    empty="no parts moved yet",
)


_MOST_BARS = 32
_MOST_ROWS = 12
_SHARE = 8  # cells of the bar that shows what was hidden
_TAIL = 2 + _SHARE + 1 + 6
_ROOMY = 52  # with fewer cells for the bars, only the percentage is printed after them


def draw_waterfall(rows: Sequence[Row], width: int) -> list[Line]:
    """Draws one bar per row on a common axis, followed by its hidden and exposed share of transfer time.

    The bar shows the median durations of the stages one after another. It begins when the layer group was ready.
    """
    shown = _most_used(rows)
    labels = [_label(row, max(8, width // 2)) for row in shown]
    margin = max(map(len, labels)) + 2
    shares = [hidden_share(row) for row in shown]
    any_share = any(share is not None for share in shares)
    roomy = width - margin >= _ROOMY
    cells = max(10, width - margin - (_TAIL if roomy else 8) * any_share)
    bars = [_stacked_bar(row) for row in shown]
    end = max((stop for bar in bars for _, stop, _ in bar), default=0.0)
    axis = units.duration(end)
    lines: list[Line] = [[(f"{'':<{margin}}0{axis:>{cells - 1}}", "dim")]]
    for label, bar, share in zip(labels, bars, shares, strict=True):
        lines.append([(f"{label:<{margin}}", ""), *segments(bar, end, cells), *_exposure(share, roomy)])
    if len(rows) > len(shown):
        lines.append([(f"{len(rows) - len(shown)} more layer groups in the table only", "dim")])
    lines.append(legend())
    if any_share:
        hidden = [(HIDDEN, "green"), (" hidden behind the forward  ", "dim"), (EXPOSED, "yellow"), (" exposed", "dim")]
        lines.append(hidden if roomy else [("% of the transfer time hidden behind the forward", "dim")])
    return lines


def busiest(rows: Sequence[Row]) -> list[Row]:
    """Returns the layer groups of each agent with the most parts: as many as make about a dozen rows, at least one."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["agent"], []).append(row)
    most = max(1, _MOST_ROWS // len(found)) if found else 0
    kept = {id(row) for each in found.values() for row in sorted(each, key=lambda row: -row["parts"])[:most]}
    return [row for row in rows if id(row) in kept]


def _most_used(rows: Sequence[Row]) -> Sequence[Row]:
    """Returns the rows with the most parts in their given order; prefers rows of prefill ranks."""
    ranking = sorted(range(len(rows)), key=lambda index: (hidden_share(rows[index]) is None, -rows[index]["parts"]))
    return [rows[index] for index in sorted(ranking[:_MOST_BARS])]


def _label(row: Row, most: int) -> str:
    text = f"{row['agent']} {Kind.LAYERS.value.human(row['layers'])} {row['path']}"
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _exposure(share: float | None, roomy: bool) -> list[Span]:
    if share is None:
        return []
    bar = [("  ", ""), *split(share, _SHARE)] if roomy else []
    return [*bar, (f" {units.percent(share):>6}", "green" if share >= 0.5 else "")]


def _stacked_bar(row: Row) -> list[tuple[float, float, Span]]:
    pieces, at = [], float((row["stages"].get("ready") or {}).get("p50_ns") or 0)
    for stage, glyph in STAGE_GLYPHS.items():
        took = (row["stages"].get(stage) or {}).get("p50_ns")
        if took:
            pieces.append((at, at + took, glyph))
            at += took
    return pieces


class PipelineDecisions:
    """Pipelining decisions of forwards, summed over all prefill ranks that answered `status`."""

    def __init__(self, statuses: Iterable[Mapping[str, Any]]) -> None:
        uses = [use for status in statuses if (use := status.get("pipeline"))]
        self.ranks = len(uses)
        self.modes = sorted({_mode(use) for use in uses})
        self.by_reason: Counter[str] = Counter()
        for use in uses:
            self.by_reason.update(use["decisions"])

    @property
    def off(self) -> bool:
        """Whether pipelining is off on all ranks and no forward was pipelined."""
        return self.modes in ([], ["off"]) and not any(self.by_reason[reason] for reason in PIPELINED)

    def summary(self) -> list[Span]:
        """Formats mode and counts: `on from 3,072 tokens   120 of 132 forwards pipelined, else mostly few-tokens`."""
        spans: list[Span] = [(" or ".join(self.modes), "bold")]
        total = sum(self.by_reason.values())
        if not total:
            return spans if self.off else [*spans, ("   no forward yet", "dim")]  # off, they are not counted
        pipelined = sum(self.by_reason[reason] for reason in PIPELINED)
        ranks = f" (on {self.ranks} ranks)" if self.ranks > 1 else ""
        spans.append((f"   {pipelined:,} of {total:,} forwards{ranks} pipelined", ""))
        others = [(count, reason) for reason, count in self.by_reason.items() if reason not in PIPELINED and count]
        if others:
            _, most = max(others)
            spans.append((f", else {'mostly ' * (len(others) > 1)}{most}", "yellow" if not pipelined else ""))
        return spans

    def lines(self) -> list[Line]:
        """Formats the summary, followed by the number of forwards for each reason and an explanation of the reason."""
        if not self.ranks:
            return []
        head: Line = [("pipeline ", "dim"), *self.summary()]
        if self.off:
            return [head]
        counts = [(units.count(self.by_reason[reason]), reason) for reason in REASONS if self.by_reason[reason]]
        # An agent that is newer than this kvctl may report further reasons.
        counts += [(units.count(self.by_reason[reason]), reason) for reason in sorted(self.by_reason.keys() - REASONS)]
        return [head, *_reason_lines(counts)]


def _mode(use: Mapping[str, Any]) -> str:
    if use["mode"] == "off":
        return "off"
    if use["group_size"] is not None:
        return f"{use['mode']}, {units.count(use['group_size'])} layers a group"
    return f"{use['mode']} from {units.count(use['min_tokens'])} tokens"


def _reason_lines(counts: Sequence[tuple[str, str]]) -> list[Line]:
    number = max((len(count) for count, _ in counts), default=0)
    name = max((len(reason) for _, reason in counts), default=0)
    return [
        [
            (f"  {count:>{number}}  ", ""),
            (f"{reason:<{name}}", "green" if reason in PIPELINED else "yellow"),
            (f"  {REASONS.get(reason, '')}", "dim"),
        ]
        for count, reason in counts
    ]
