"""`kvctl record`: saves snapshots of a fleet, with all events between them, in one file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import click

from kvctl.client.recorder import Saving, Series, save_recording, unchanged
from kvctl.client.redaction import Redaction
from kvctl.commands.options import KvctlCommand, duration, pass_settings
from kvctl.commands.output import Output
from kvctl.commands.queries import conclude, source
from kvctl.commands.settings import Settings
from kvctl.commands.stdio import ProgressLine
from kvctl.exit_codes import ExitCode
from kvctl.render import units
from kvctl.render.report import Report
from kvctl.render.view import Column, Kind, View, Width

RECORDED = View(
    "recording",
    (
        Column("agent"),
        Column("role"),
        Column("events", Kind.COUNT, help="events in the file"),
        Column("rooms", Kind.COUNT, help="finished rooms whose timelines are in the file"),
        Column(
            "lost", Kind.COUNT, Width.WIDE, help="events that the agent's flight recorder dropped between snapshots"
        ),
        Column("incarnation", width=Width.WIDE),
    ),
    sort=("agent",),
    empty="no agents",
)


_TIME = duration("1ms")

redact_option = click.option(
    "--redact", is_flag=True, help="Replace names of hosts and users, addresses, paths and keys."
)


@click.command(
    cls=KvctlCommand,
    examples=[
        ("One snapshot, after something went wrong", "kvctl record incident.kvrec"),
        ("Five minutes, a snapshot every two seconds", "kvctl record fleet.kvrec --for 5m --every 2s"),
        ("Read it again", "kvctl rooms --from fleet.kvrec"),
        ("For a report to others", "kvctl record incident.kvrec --redact"),
        ("Redact a recording that exists", "kvctl record --from incident.kvrec public.kvrec --redact"),
    ],
)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--for", "for_ns", type=_TIME, metavar="TIME", help="Record for 30s, 5m, …; without it one snapshot.")
@click.option(
    "--every", "every_ns", type=_TIME, default="1s", show_default=True, metavar="TIME", help="Time between snapshots."
)
@redact_option
@pass_settings
def record(settings: Settings, file: Path, for_ns: int | None, every_ns: int, redact: bool) -> None:
    """Save to FILE everything that the reading commands show, and with --for all events between the snapshots.

    Every reading command reads the file with --from FILE, and kvctl top plays it. Agents always keep their latest
    events, and the timelines of their latest rooms: record one snapshot after something went wrong, or use --for before
    something is expected to. Ctrl-C ends it early; the file is valid.

    All agents are saved, or those that -e and -l select. An existing FILE is replaced. It contains page numbers, names
    and addresses, and no KV.

    With --redact each host, user, address, path and key gets another name (host-1, path-3), the same everywhere; names
    of agents stay. With --from an older recording is redacted.
    """
    if settings.from_file is not None and for_ns is not None:
        raise click.UsageError("--from copies a whole recording: leave out -e, -l and --for")
    save(settings, file, for_ns or 0, every_ns, redact)


def save(settings: Settings, file: Path, for_ns: int, every_ns: int, redact: bool) -> NoReturn:
    """Saves snapshots of the fleet, or the recording of --from, and exits; prints what the file has and how to read it.

    Args:
        for_ns: time from the first snapshot to the last; 0 for a single snapshot.
    """
    if settings.from_file is not None and not redact:
        raise click.UsageError("--from copies a recording to redact it: add --redact")
    if settings.from_file is not None and (settings.endpoints or settings.labels):
        raise click.UsageError("--from copies a whole recording: leave out -e, -l and --for")
    output = Output(settings)
    output.selection(RECORDED)
    change = Redaction.of_this_machine().snapshot if redact else unchanged
    with source(settings) as fleet, ProgressLine(settings.quiet or not for_ns) as line:
        series = Series(for_ns, every_ns, lambda *state: line.show(_progress(*state)))
        saving = save_recording(fleet, file, series, change, settings.from_file)
    report = Report(RECORDED, [asdict(saved) for saved in saving.saved], len(saving.saved), saving.faults)
    if saving.saved:
        report.notes += [*_notes(saving), _saved_text(file, saving)]
        output.emit(report)
    code = conclude(output, settings, saving.survey, report)
    raise click.exceptions.Exit(ExitCode.INTERRUPTED if saving.interrupted else code)


def _progress(moments: int, nbytes: int, left_ns: int) -> str:
    return f"{moments} snapshots, {units.size(nbytes)}, {left_ns / 1e9:.0f} s left; Ctrl-C ends it"


def _saved_text(path: Path, saving: Saving) -> str:
    moments = saving.moments
    text = f"{len(moments)} snapshot{'s' * (len(moments) != 1)}"
    if len(moments) > 1:
        text += f" in {units.duration(moments[-1] - moments[0])}"
    return f"{text} saved to {path}: kvctl status --from {path}"


def _notes(saving: Saving) -> list[str]:
    lost = [
        f"{saved.agent}: {saved.lost} events between two snapshots, more than its flight recorder holds"
        for saved in saving.saved
        if saved.lost
    ]
    return [f"not in the file: {text}" for text in [*saving.left_out, *lost]]
