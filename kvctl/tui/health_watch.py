"""Runs the health codes beside the view: against the survey before, and without what the operator has muted."""

from __future__ import annotations

from collections.abc import Sequence

from kvctl.client.fleet import Survey
from kvctl.errors import CliError
from kvctl.health import mute_file
from kvctl.health.codes import CODES
from kvctl.health.engine import examine
from kvctl.health.mutes import Judged, Mute, judge
from kvctl.health.snapshot import Snapshot


class HealthWatch:
    """Judges one survey of the health calls after the other."""

    def __init__(self) -> None:
        self._before: Snapshot | None = None

    def judge(self, survey: Survey) -> Judged:
        """What is wrong now. A survey from before the last, as of a recording turned back, is compared with none."""
        before = self._before if self._before is None or self._before.taken_ns < survey.tick_ns else None
        found = examine(Snapshot(survey, survey.tick_ns, before), CODES)
        self._before = Snapshot(survey, survey.tick_ns)  # without its own past: that chain would never be freed
        return judge(found, _mutes(), survey.at_ns)


def _mutes() -> Sequence[Mute]:
    """What the operator has muted; where that cannot be read nothing is, and `kvctl health` says why."""
    try:
        return mute_file.load(mute_file.path())
    except CliError:
        return ()
