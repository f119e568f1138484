"""View of layer groups: the duration of each stage, and the share of the transfer time that compute hides.

`ready` is the time since the first layer group of the chunk was ready; each other stage follows the one before it.
"""

from __future__ import annotations

from kvctl.render.kinds import Kind
from kvctl.render.view import Column, Row, View, Width
from kvctl_agent.contract.states import STAGES


def hidden_share(row: Row) -> float | None:
    """Returns the share of the transfer time that was hidden by compute; None if unknown."""
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
