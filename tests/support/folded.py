"""What the region of an agent in this process tells its readers."""

from __future__ import annotations

import weakref
from functools import partial

from kvctl_agent.observer.fold import Fold, FoldedRegion
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.telemetry.region import MemoryReader

LIMITS = {"history": 256, "failed": 256, "timeline_events": 512, "recorder_events": 1024}
_readers: weakref.WeakKeyDictionary[Telemetry, FoldedRegion] = weakref.WeakKeyDictionary()


def region_of(telemetry: Telemetry, **limits: int) -> FoldedRegion:
    """Returns the region's reader and fold; the first call for a telemetry sets its limits."""
    if (reader := _readers.get(telemetry)) is None:
        memory = MemoryReader(telemetry.region)
        reader = _readers[telemetry] = FoldedRegion(memory, partial(_flush, weakref.ref(telemetry)), **LIMITS | limits)
    return reader


def folded(telemetry: Telemetry, **limits: int) -> Fold:
    """Returns the fold of all that was written so far."""
    return region_of(telemetry, **limits).catch_up()


def _flush(telemetry: weakref.ref[Telemetry]) -> None:
    if (living := telemetry()) is not None:
        living.flush(wait=True)
