"""`kvctl debug`: saves everything about a fleet in one file (a bundle), and lists the files of a bundle."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from time import localtime, strftime

import click

from kvctl.client.atomic_file import atomic_file
from kvctl.client.bundles import checked, is_bundle
from kvctl.client.faults import exit_code, lines
from kvctl.client.recording_file import RecordingError
from kvctl.client.recordings import file_errors
from kvctl.commands.debug_bundle import BundleResult, write_bundle
from kvctl.commands.options import KvctlGroup
from kvctl.commands.output import Output
from kvctl.commands.queries import live
from kvctl.commands.settings import Settings
from kvctl.commands.stdio import print_error
from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode
from kvctl.render.report import Report
from kvctl.render.view import Column, Kind, View, Width

BUNDLE = View(
    "bundle",
    (
        Column("file"),
        Column("size", Kind.BYTES, path="bytes"),
        Column("what"),
        Column("sha256", width=Width.WIDE),
    ),
    empty="an empty bundle",
)


@click.group(cls=KvctlGroup)
def debug() -> None:
    """Bundles: all data about a fleet in one file, for a report."""


@debug.command(
    short_help="Save everything about the fleet in one file.",
    examples=[
        ("A bundle for a report", "kvctl debug bundle incident.tar.zst --redact"),
        ("Redact a bundle that exists", "kvctl debug bundle --from incident.tar.zst --redact public.tar.zst"),
    ],
)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--redact", is_flag=True, help="Replace names of hosts and users, addresses, paths and keys.")
def bundle(settings: Settings, file: Path, redact: bool) -> None:
    """Save to FILE (.tar.zst) the output of every reading command, stacks, metrics, health and host facts.

    Agents that hang or refuse are named in it and do not delay it. Ctrl-C leaves a valid file with the data collected
    so far. Reading commands take a bundle with --from FILE like a recording, kvctl debug show lists it, tar --zstd -xf
    FILE unpacks it. An existing FILE is replaced. It contains names and addresses, and no KV.

    With --redact each host, user, address, path and key gets another name (host-1, path-3), the same everywhere; names
    of agents stay. With --from an older recording or bundle is redacted.
    """
    output = Output(settings)
    output.selection(BUNDLE)
    try:
        with atomic_file(file) as opened:
            directory = file.resolve().parent
            if settings.from_file is not None:
                result = write_bundle(opened, directory, settings.from_file, redact, output.detail)
            else:
                with live(settings) as fleet:
                    result = write_bundle(opened, directory, fleet, redact, output.detail)
    except OSError as error:
        raise CliError(f"cannot write {file}: {error.strerror or error}") from error
    rows = [{"file": entry.name, **asdict(entry)} for entry in result.entries]
    output.emit(Report(BUNDLE, rows, result.agents, result.faults))
    raise click.exceptions.Exit(_conclude(output, file, result))


def _conclude(output: Output, path: Path, result: BundleResult) -> ExitCode:
    for line in lines(result.faults):
        print_error(line)
    for text in result.failed:
        print_error(f"not in the bundle: {text}")
    for text in result.left_out:
        output.note(f"left out: {text}")
    if not result.agents:
        print_error("no agent answered: the bundle has facts about this machine only")
    if result.partial:
        print_error(f"interrupted: {path} has the data collected so far")
        return ExitCode.INTERRUPTED
    output.note(f"saved to {path}: kvctl status --from {path}, kvctl debug show {path}")
    return exit_code(result.agents, result.faults)


@debug.command(
    short_help="List the files of a bundle.",
    examples=[("What is in a bundle, with its checksums", "kvctl debug show incident.tar.zst")],
)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def show(settings: Settings, file: Path) -> None:
    """List the files of a bundle and verify their checksums; files that it lacks are named on stderr."""
    output = Output(settings)
    output.selection(BUNDLE)
    with file_errors(file), file.open("rb") as opened:
        if not is_bundle(opened):
            raise RecordingError("it is not a bundle of kvctl: create one with kvctl debug bundle")
        manifest = checked(opened)
    output.emit(Report(BUNDLE, [{"file": each["name"], **each} for each in manifest["files"]], answered=1))
    for key, text in (("failed", "not in the bundle"), ("left_out", "left out")):
        for each in manifest.get(key) or ():
            output.note(f"{text}: {each}")
    made = strftime("%Y-%m-%d %H:%M:%S %Z", localtime(int(manifest.get("made_at_ns") or 0) / 1e9))
    which = [name for name in ("redacted", "partial") if manifest.get(name)]
    output.note(", ".join([f"made by kvctl {manifest.get('kvctl')} at {made}", *which]))
