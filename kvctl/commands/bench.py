"""`kvctl bench`: starts ranks on this machine, moves real KV between them, verifies every byte and prints a table."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import click

from kvctl.commands.bench_options import GroupedCommand, bench_options
from kvctl.commands.bench_request import BenchRequest, plan_fleets, resolve
from kvctl.commands.options import given, pass_settings
from kvctl.commands.output import Output
from kvctl.commands.settings import Settings
from kvctl.commands.stdio import print_error
from kvctl.exit_codes import ExitCode
from kvctl.lab.bench.html_report import write_result
from kvctl.lab.bench.results import Outcome
from kvctl.lab.bench.session import Session, Steps, measure
from kvctl.lab.bench.variants import Variant
from kvctl.lab.bench.views import BENCH, PLAN, blocks, plan_captions, plan_rows, plan_table
from kvctl.lab.ranks.group import FleetError
from kvctl.lab.ranks.plan import Plan
from kvctl.render.report import Block, Grid, Report, Text

PlannedFleets = Sequence[Sequence[tuple[Variant, Plan]]]


@click.command(
    cls=GroupedCommand,
    params=bench_options(),
    examples=[
        ("Four TP prefill ranks to four DP decode ranks", "kvctl bench --prefill-tp 4 --decode-dp 4"),
        ("Print the plan and start nothing", "kvctl bench --prefill-tp 4 --decode-dp 4 --plan"),
        ("Two decode ranks that share each prompt", "kvctl bench --prefill-tp 4 --decode-cp 2"),
        ("Unlike pools and pages", "kvctl bench --kv-layout hnd,fused --decode-page-size 64"),
        ("Sliding-window layers", "kvctl bench --kv-group swa:layers=16,page=16,window=1024 --tokens 4096"),
        ("A report to read in a browser", "kvctl bench --prefill-tp 2 --decode-dp 2 --html report.html"),
        (
            "Real SGLang servers",
            "kvctl bench --engine sglang --model MODEL --sides nixl,kvctl --sweep tokens=1024,8192",
        ),
    ],
)
@pass_settings
def bench(settings: Settings, plan_only: bool, **options: Any) -> None:
    """Move real KV between prefill and decode ranks on this machine, and verify every byte.

    Starts one process per rank, runs requests through them on every path side by side, and prints throughput, latency
    and costs next to the limits of this machine's memory and transport. Exits 0 only if everything was verified.
    kvctl status in a second terminal shows the fleet meanwhile.

    With --engine sglang, starts SGLang's servers for each of --sides instead, and prints time to first token, time per
    token and tokens per second. Exits 0 only if every side generated the tokens of an undivided server.
    """
    on_line = given(options)
    output = Output(settings)
    if options["engine"] == "sglang":
        from kvctl.commands.bench_sglang import bench_sglang

        raise click.exceptions.Exit(bench_sglang(output, settings, options, on_line, plan_only))
    if servers := sorted(on_line & {"sides", "together", "server_args"}):
        raise click.BadParameter("requires --engine sglang", param_hint=f"--{servers[0].replace('_', '-')}")
    request = resolve(options, on_line)
    output.selection(PLAN if plan_only else BENCH)  # refuses unknown columns before any process is started
    planned = plan_fleets(request, output)
    if plan_only:
        rows = [row for pairs in planned for variant, plan in pairs for row in plan_rows(plan, variant.name)]
        view = plan_table(rows)
        captions = plan_captions([plan for pairs in planned for _, plan in pairs])
        text: list[Block] = [Text([[(line, "")] for line in captions])] if captions else []
        output.emit(Report(view, rows, answered=1, blocks=lambda kept, _width: [*text, Grid(view, kept)]))
        return
    raise click.exceptions.Exit(BenchRun(output, settings, request, planned).run())


class BenchRun:
    """Runs the planned fleets and reports their results."""

    def __init__(self, output: Output, settings: Settings, request: BenchRequest, planned: PlannedFleets) -> None:
        self._output = output
        self._settings = settings
        self._request = request
        self._planned = planned
        self._outcome = Outcome()
        self._started_at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())

    @property
    def _options(self) -> Mapping[str, Any]:
        return self._request.options

    def run(self) -> ExitCode:
        """Measures all fleets, prints the results and returns the exit code.

        After a failure or Ctrl-C the results so far are printed.
        """
        code = ExitCode.OK
        with Steps(self._settings.quiet, self._output.detail) as steps:
            steps.expect(sum(self._request.program.trials(plan) for pairs in self._planned for _, plan in pairs))
            for pairs in self._planned:
                with ExitStack() as stack:
                    sessions = [self._session(*pair, len(pairs) > 1, stack, steps) for pair in pairs]
                    code = self._measure(sessions, steps)
                    code = code or self._stop(sessions)
                if code is not ExitCode.OK:
                    break
        return self._report() or code

    def _session(self, variant: Variant, plan: Plan, together: bool, stack: ExitStack, steps: Steps) -> Session:
        """Creates a session and lets `stack` close it.

        Args:
            together: whether other fleets run at the same time; rank names are then prefixed with the variant's name.
        """
        session = stack.enter_context(
            Session(
                variant,
                plan,
                self._request.program,
                steps,
                self._options["verify"],
                self._options["point_seconds"],
                label=variant.name if self._request.several else "",
                rank_prefix=variant.name if together else "",
            )
        )
        self._outcome.measured.append(session.results)
        return session

    def _measure(self, sessions: Sequence[Session], steps: Steps) -> ExitCode:
        try:
            measure(sessions, steps)
        except KeyboardInterrupt:
            return ExitCode.INTERRUPTED
        except FleetError as error:
            steps.end()
            print_error(str(error))
            return ExitCode.FAILED
        return ExitCode.OK

    def _stop(self, sessions: Sequence[Session]) -> ExitCode:
        """Stops the fleets; returns FAILED if a rank exits with an error, although the measurements are complete."""
        crashed: dict[str, int] = {}
        try:
            for session in sessions:
                session.fleet.stop()
            for session in sessions:
                crashed |= {name: status for name, status in session.fleet.close().items() if status}
        except KeyboardInterrupt:
            return ExitCode.INTERRUPTED
        except FleetError as error:
            print_error(str(error))
            return ExitCode.FAILED
        for name, status in crashed.items():
            print_error(f'rank "{name}" ended with status {status} after the bench had finished')
        return ExitCode.FAILED if crashed else ExitCode.OK

    def _report(self) -> ExitCode:
        """Prints and saves the results; returns FAILED if rooms failed or bytes were wrong."""
        rows = self._outcome.rows()
        problems = self._outcome.problems
        if rows:
            terminal = partial(blocks, outcome=self._outcome)
            html = self._options["html"]
            write_result(self._options["save"], html, self._outcome.document(), terminal(rows), self._started_at)
            if html is not None:
                self._output.note(f"the report is in {html}")
            self._output.emit(Report(BENCH, rows, answered=1, blocks=lambda kept, _width: terminal(kept)))
        for line in problems:
            print_error(line)
        return ExitCode.FAILED if problems or self._outcome.verified is False else ExitCode.OK
