"""How commands look at a fleet's health: against a reading before, and without what the operator has muted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvctl.client.calls import Call
from kvctl.client.fleet import Survey
from kvctl.commands.queries import source
from kvctl.commands.settings import Settings
from kvctl.health import mute_file
from kvctl.health.codes import CODES
from kvctl.health.engine import examine
from kvctl.health.mutes import Judged, judge
from kvctl.health.snapshot import HEALTH_CALLS, Snapshot

PAUSE_S = 1.0
"""Between two readings, for what only growth shows: long enough for a slow lane to move something, short enough to
wait for."""


_PATIENCE_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class HealthReading:
    """What one look at the fleet brought; `remarks` are for stderr."""

    snapshot: Snapshot
    judged: Judged
    remarks: Sequence[str]


class HealthQuery:
    """Turns each survey into a look, compared with the one before it."""

    def __init__(self, settings: Settings, before: Snapshot | None = None) -> None:
        self._before = before
        self._settings = settings

    def __call__(self, survey: Survey) -> HealthReading:
        snapshot = Snapshot(survey, survey.tick_ns, self._before)
        self._before = Snapshot(survey, survey.tick_ns)  # without its own past: that chain would never be freed
        # What is muted here is muted of the fleet that lives; a file is looked at for what is in it.
        mutes, remarks = mute_file.in_force() if self._settings.from_file is None else ([], [])
        return HealthReading(snapshot, judge(examine(snapshot, CODES), mutes, time.time_ns()), remarks)


def earlier(settings: Settings, calls: Sequence[Call] = HEALTH_CALLS) -> Snapshot | None:
    """A reading to compare the next one with: taken a moment ago, or the one before in a file.

    With `-w` there is none: the next reading comes soon enough.

    Raises:
        CliError: nobody can be asked at all.
    """
    if settings.watch_ns is not None:
        return None
    if settings.from_file is not None:
        return _moment_before(settings, calls)
    # Who does not answer this one is waited for by the next.
    brief = replace(settings, timeout_ns=min(settings.timeout_ns, _PATIENCE_NS))
    with source(brief) as fleet:
        survey = fleet.survey(calls)
    if not survey.agents:
        return None
    # From the end of one reading to the end of the next at least: some codes want a heartbeat between the two.
    time.sleep(max(0.0, PAUSE_S - (time.monotonic_ns() - survey.tick_ns) / 1e9))
    return Snapshot(survey, survey.tick_ns)


def _moment_before(settings: Settings, calls: Sequence[Call]) -> Snapshot | None:
    from kvctl.client.recording_source import RecordingSource

    with source(settings) as file:
        if not isinstance(file, RecordingSource) or file.moment == 0:
            return None
        file.seek(file.moment - 1)
        survey = file.survey(calls)
    return Snapshot(survey, survey.tick_ns)
