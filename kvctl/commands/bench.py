"""`kvctl bench`: fleets on this machine, real KV through them, every byte verified, and a table."""

from __future__ import annotations

from typing import Any

import click

from kvctl.commands.bench_options import GroupedCommand, bench_options
from kvctl.commands.bench_request import understand
from kvctl.commands.bench_run import BenchRun, checked_columns, plan_all
from kvctl.commands.options import pass_settings
from kvctl.commands.output import Output
from kvctl.commands.settings import Settings
from kvctl.lab.bench.baseline import load_baseline
from kvctl.lab.bench.views import plan_rows, plan_table
from kvctl.render.report import Report


@click.command(
    cls=GroupedCommand,
    params=bench_options(),
    examples=[
        ("Four TP prefill ranks to four DP decode ranks", "kvctl bench --prefill-tp 4 --decode-dp 4"),
        ("Print the plan and start nothing", "kvctl bench --prefill-tp 4 --decode-dp 4 --plan"),
        ("A report to read in a browser", "kvctl bench --prefill-tp 2 --decode-dp 2 --html report.html"),
    ],
)
@pass_settings
def bench(settings: Settings, plan_only: bool, **options: Any) -> None:
    """Move real KV between prefill and decode ranks on this machine, and verify every byte.

    Starts one process per rank, drives requests through them on every path side by side, and prints throughput,
    latency and costs next to what this machine's memory and transport can do at best. Exits 0 only when everything
    verified. In a second terminal, kvctl status shows the fleet while it runs.
    """
    ctx = click.get_current_context()
    given = {name for name in options if ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT}
    output = Output(settings)
    asked = understand(options, given)
    checked_columns(output, asked, plan_only)
    baseline = None
    if options["baseline"] is not None:
        try:
            baseline = load_baseline(options["baseline"])
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--baseline") from error
    for note in asked.notes:
        output.note(note)
    planned = plan_all(asked, output)
    if plan_only:
        fleets = [pair for _, pairs in planned for pair in pairs]
        rows = [row for variant, plan in fleets for row in plan_rows(plan, variant.name)]
        output.emit(Report(plan_table(rows), rows, answered=1))
        return
    raise click.exceptions.Exit(BenchRun(output, settings, asked, planned, baseline).run())
