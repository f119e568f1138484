"""View of layer groups: how long each stage takes, and how much of a part's way compute hides.

`ready` is how much later than its chunk's first group a group was computed; the other stages follow one another.
"""

from __future__ import annotations

from kvctl.render.kinds import Kind
from kvctl.render.view import Column, Row, View, Width
from kvctl_agent.contract.states import STAGES


def hidden_share(row: Row) -> float | None:
    """Share of the time on the way that was hidden behind compute."""
    exposed, overlapped = row.get("exposed_ns"), row.get("overlapped_ns")
    if exposed is None or overlapped is None or exposed + overlapped == 0:
        return None
    return float(overlapped / (exposed + overlapped))


def _median(stage: str) -> Column:
    width = Width.NORMAL if stage in {"ready", "queue"} else Width.CORE
    return Column(f"{stage}_p50", f"stages.{stage}.p50_ns", Kind.DURATION, width, header=stage.upper())


LAYERS = View(
    "layers",
    (
        Column("agent"),
        Column("layers", kind=Kind.LAYERS),
        Column("path", width=Width.NORMAL),
        Column("parts", kind=Kind.COUNT, width=Width.NORMAL),
        Column("bytes", kind=Kind.BYTES, width=Width.NORMAL),
        *(_median(stage) for stage in STAGES),
        Column("exposed", kind=Kind.DURATION, width=Width.NORMAL),
        Column("hidden", "overlapped_ns", Kind.DURATION, Width.NORMAL),
        Column("share", hidden_share, Kind.RATIO, Width.NORMAL),
        *(
            Column(f"{stage}_{quantile}", f"stages.{stage}.{quantile}_ns", Kind.DURATION, Width.WIDE)
            for stage in STAGES
            for quantile in ("p90", "p99")
        ),
    ),
    sort=("agent", "layers"),
    empty="no parts moved yet",
)
