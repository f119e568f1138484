"""Runs what `kvctl bench` was asked for: fleets up, laps in turns, and whatever was measured printed and saved."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import click
import orjson

from kvctl.commands.bench_request import BenchRequest, Fleets
from kvctl.commands.output import Output
from kvctl.commands.settings import Settings
from kvctl.commands.stdio import complain
from kvctl.exit_codes import ExitCode
from kvctl.lab.bench.baseline import compare, failures
from kvctl.lab.bench.deltas import with_delta
from kvctl.lab.bench.fleet import Fleet
from kvctl.lab.bench.outcome import Measured, Outcome
from kvctl.lab.bench.preset_views import PIPELINE, comparison_view, contestants, side_by_side
from kvctl.lab.bench.presets import Comparison
from kvctl.lab.bench.progress import Steps
from kvctl.lab.bench.session import Session, laps_of, measure
from kvctl.lab.bench.traffic import with_requests
from kvctl.lab.bench.variants import Variant
from kvctl.lab.bench.views import BENCH, PLAN, blocks
from kvctl.lab.ranks.group import FleetError, rank_names
from kvctl.lab.ranks.plan import Plan
from kvctl.lab.ranks.planner import plan as make_plan
from kvctl.render.report import Report
from kvctl_agent.contract.settings import near

PlannedFleets = Sequence[tuple[Fleets, Sequence[tuple[Variant, Plan]]]]


def plan_all(asked: BenchRequest, output: Output) -> PlannedFleets:
    """Plan every fleet before any is started; tells what plans remark.

    Raises:
        CliError: one of them cannot be.
    """
    planned = []
    told: set[str] = set()
    for wave in asked.waves:
        pairs = []
        for variant in wave.variants:
            plan = make_plan(variant.request)
            if asked.source is not None:
                decodes = variant.request.decode_ms > 0
                request = with_requests(variant.request, asked.source, plan["shape"], decodes)
                variant, plan = replace(variant, request=request), make_plan(request)
            _check_paused(asked, plan)
            pairs.append((variant, plan))
            for note in plan["notes"]:
                if note not in told:
                    told.add(note)
                    output.note(note)
        planned.append((wave, pairs))
    return planned


def _check_paused(asked: BenchRequest, plan: Plan) -> None:
    """Refuse a pause of a rank that there is not, before any is started.

    Raises:
        click.BadParameter: there is none of that name.
    """
    names = rank_names(plan["ranks"])
    for fault in asked.options["faults"]:
        if fault.rank and fault.rank not in names:
            text = f"{fault.text}: there is no rank {fault.rank}{near(fault.rank, names)}; there are {', '.join(names)}"
            raise click.BadParameter(text, param_hint="--faults")


class BenchRun:
    """One call of the command, from the plans on."""

    def __init__(
        self,
        output: Output,
        settings: Settings,
        asked: BenchRequest,
        planned: PlannedFleets,
        baseline: dict[str, Any] | None,
    ) -> None:
        self._output = output
        self._settings = settings
        self._asked = asked
        self._planned = planned
        self._baseline = baseline
        self._outcome = Outcome(asked.preset.name if asked.preset else "", asked.source)
        self._started_at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())

    @property
    def _options(self) -> Mapping[str, Any]:
        return self._asked.options

    def run(self) -> ExitCode:
        """Measure, print, and hold if wanted; whatever was measured before a failure or Ctrl-C is printed too."""
        code = ExitCode.OK
        with Steps(self._settings.quiet, self._output.detail) as steps:
            steps.laps(sum(laps_of(wave.program, plan) for wave, pairs in self._planned for _, plan in pairs))
            for wave, pairs in self._planned:
                with ExitStack() as stack:
                    sessions = [self._session(wave, *pair, len(pairs) > 1, stack, steps) for pair in pairs]
                    code = self._measure(sessions, steps)
                    if code is ExitCode.OK and self._options["hold"]:
                        steps.end()
                        return self._hold(sessions[0])
                    code = code or self._stop([session.fleet for session in sessions])
                if code is not ExitCode.OK:
                    break
        return self._report() or code

    def _session(
        self, wave: Fleets, variant: Variant, plan: Plan, together: bool, stack: ExitStack, steps: Steps
    ) -> Session:
        """A fleet that is not started yet, closed with `stack`; `together` with others that have the same ranks."""
        fleet = stack.enter_context(Fleet(plan, variant.request, variant.name if together else ""))
        label = variant.name if self._asked.several else ""
        decode_ms = variant.request.decode_ms
        session = Session(
            fleet, plan, wave.program, self._options["verify"], decode_ms, label, steps, self._options["point_seconds"]
        )
        self._outcome.measured.append(Measured(variant, session))
        return session

    def _measure(self, sessions: Sequence[Session], steps: Steps) -> ExitCode:
        try:
            measure(sessions, steps)
        except KeyboardInterrupt:
            return ExitCode.INTERRUPTED
        except FleetError as error:
            trouble = str(error)
        else:
            return ExitCode.OK
        steps.end()
        complain(trouble)
        return ExitCode.FAILED

    def _hold(self, session: Session) -> ExitCode:
        code = self._report()
        self._output.note("holding the fleet: kvctl status shows it, Ctrl-C ends it")
        try:
            session.hold()
        except KeyboardInterrupt:
            return code
        except FleetError as error:
            complain(str(error))
        return ExitCode.FAILED

    def _stop(self, fleets: Sequence[Fleet]) -> ExitCode:
        """Everything was measured; a rank that cannot even leave in order is a failure all the same."""
        crashed: dict[str, int] = {}
        try:
            for fleet in fleets:
                fleet.stop()
            for fleet in fleets:
                crashed |= {name: status for name, status in fleet.close().items() if status}
        except KeyboardInterrupt:
            return ExitCode.INTERRUPTED
        except FleetError as error:
            complain(str(error))
            return ExitCode.FAILED
        for name, status in crashed.items():
            complain(f'rank "{name}" ended with status {status} after it had finished')
        return ExitCode.FAILED if crashed else ExitCode.OK

    def _report(self) -> ExitCode:
        """Print and save what there is; FAILED where it is not what it should be."""
        rows = self._outcome.rows()
        trouble = self._outcome.trouble
        if rows:
            self._write()
            if self._baseline is not None:
                rows, more = self._compared(rows)
                trouble += more
            self._output.emit(self._table(rows))
        for line in trouble:
            complain(line)
        return ExitCode.FAILED if trouble or self._outcome.verified is False else ExitCode.OK

    def _write(self) -> None:
        """The files that were asked for."""
        save, html = self._options["save"], self._options["html"]
        if save is not None:
            save.write_bytes(orjson.dumps(self._outcome.document(), option=orjson.OPT_INDENT_2) + b"\n")
        if html is not None:
            from kvctl.lab.bench.html.document import render  # drawing is only for those who want a picture

            command = shlex.join(["kvctl", *sys.argv[1:]])
            html.write_text(render(self._outcome.report(command, self._started_at)), encoding="utf-8")
            self._output.note(f"the report is in {html}")

    def _compared(self, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
        """The rows held against the baseline, and what is wrong with them."""
        assert self._baseline is not None
        file, allowed = self._options["baseline"], self._options["max_regress"]
        shape = self._outcome.measured[0].session.results.plan["shape"]
        try:
            rows = compare(rows, shape, self._baseline, allowed)
        except ValueError as error:
            return rows, [f"{file}: {error}"]
        regressed = [f"FAIL: {line}" for line in failures(rows)]
        if not regressed:
            self._output.note(f"PASS: within {allowed:.0%} of {file}")
        return rows, regressed

    def _table(self, rows: list[dict[str, Any]]) -> Report:
        """The published table of a preset, or the comparison that was asked for."""
        preset = self._asked.preset
        picture = partial(blocks, outcome=self._outcome)
        if preset is None:
            return Report(BENCH, rows, answered=1, blocks=lambda kept, _width: picture(kept, view=None))
        if isinstance(preset.table, Comparison):
            named = list(zip(contestants(rows), rows, strict=True))
            short = {name for name, row in named if row["rooms"] < row["planned_rooms"]}
            names = list(dict.fromkeys(name for name, _ in named))
            view = comparison_view(preset.name, preset.table.by, preset.table.measures, names, short)
            lines = side_by_side(rows, preset.table.by[0])
        else:
            view = preset.table
            # What was measured only to know the plain transfer is saved, but no line of the table.
            lines = [row for row in rows if preset.table is not PIPELINE or "ratio" in row]
            if preset.within:
                lines = with_delta(lines, preset.within)
        return Report(view, lines, answered=1, blocks=lambda kept, _width: picture(kept, view=view))


def checked_columns(output: Output, asked: BenchRequest, plan_only: bool) -> None:
    """Refuse `--columns` and the like before anything is started, where the columns are known by now.

    Raises:
        click.UsageError: they do not fit the table that will be printed.
    """
    if plan_only:
        output.selection(PLAN)
    elif asked.preset is None:
        output.selection(BENCH)
    elif not isinstance(asked.preset.table, Comparison):
        output.selection(asked.preset.table)
