"""`kvctl debug`: everything that somebody else needs to look into a fleet's trouble, in one file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from time import localtime, strftime

import click

from kvctl.client.captured_bundle import checked, is_bundle
from kvctl.client.captured_file import readable
from kvctl.client.faults import exit_code, lines
from kvctl.client.fleet import Fleet
from kvctl.client.recordings import whole_file
from kvctl.commands.debug_bundle import HOST, HOST_TEXT, TEXTS, Bundled, Wish, write_bundle
from kvctl.commands.options import KvctlGroup, pass_settings
from kvctl.commands.output import Output
from kvctl.commands.record import FileCommand
from kvctl.commands.settings import Settings
from kvctl.commands.stdio import complain
from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode
from kvctl.views.bundles import BUNDLE
from kvctl.views.report import Report
from kvctl_agent.contract.recording import RecordingError


@click.group(cls=KvctlGroup)
def debug() -> None:
    """Bundles: all that is known of a fleet in one file, to be looked at by whoever it is sent to."""


@debug.command(cls=FileCommand, short_help="Save all there is to know in one file.")
@click.option(
    "-o",
    "--output",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where it goes (FILE.tar.zst); an old one of that name is replaced.",
)
@click.option("--redact", is_flag=True, help="Without names of hosts and users, addresses, paths and keys.")
@click.option("--list", "listed", is_flag=True, help="Only say what would be in it.")
@pass_settings
def bundle(settings: Settings, path: Path | None, redact: bool, listed: bool) -> None:
    """Save all there is to know: what every reading command shows, stacks, metrics, health, this machine.

    Agents that hang or refuse are named in it and do not hold it up. Ctrl-C leaves what there is so far, in a file that
    can be read. Everywhere else --from FILE takes a bundle like a recording; kvctl debug show lists it; tar --zstd -xf
    FILE unpacks it. Names and addresses are in it, no KV.

    With --redact each host, user, address, path and key has another name (host-1, path-3), the same everywhere; names
    of agents stay, and the inputs of their machines are left out. With --from FILE an older recording or bundle is
    redacted.
    """
    output = Output(settings)
    output.selection(BUNDLE)
    if listed:
        rows = [
            {"file": "recording.kvrec", "what": "moments of the fleet, for --from"},
            *({"file": text.name, "what": f"{text.what}: kvctl {' '.join(text.args)}"} for text in TEXTS),
            {"file": HOST_TEXT.name, "what": f"{HOST_TEXT.what}: kvctl {' '.join(HOST_TEXT.args)}"},
            {"file": HOST, "what": "the same machine in numbers"},
            {"file": "manifest.json", "what": "versions, checksums, what failed"},
        ]
        output.emit(Report(BUNDLE, rows, answered=1))
        return
    if path is None:
        raise click.UsageError("-o FILE.tar.zst is missing: where the bundle goes")
    try:
        with whole_file(path) as file:
            if settings.from_file is not None:
                made = write_bundle(file, path.resolve().parent, Wish(None, settings.from_file, redact, output.detail))
            else:
                with Fleet(settings.endpoints, settings.labels, settings.timeout_ns, settings.keys) as fleet:
                    made = write_bundle(file, path.resolve().parent, Wish(fleet, None, redact, output.detail))
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror or error}") from error
    rows = [{"file": entry.name, **asdict(entry)} for entry in made.entries]
    output.emit(Report(BUNDLE, rows, made.agents, made.faults))
    raise click.exceptions.Exit(_conclude(output, path, made))


def _conclude(output: Output, path: Path, made: Bundled) -> ExitCode:
    for line in lines(made.faults):
        complain(line)
    for text in made.failed:
        complain(f"not in the bundle: {text}")
    for text in made.left_out:
        output.note(f"left out: {text}")
    if not made.agents:
        complain("no agent answered: what is in the bundle is of this machine and of those that were looked for")
    if made.partial:
        complain(f"interrupted: {path} holds what there was so far")
        return ExitCode.INTERRUPTED
    output.note(f"saved to {path}: kvctl status --from {path}, kvctl debug show {path}")
    return exit_code(made.agents, made.faults)


@debug.command(short_help="What is in a bundle.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@pass_settings
def show(settings: Settings, file: Path) -> None:
    """What is in a bundle, each file held against the manifest's checksum; what it lacks is said on stderr."""
    output = Output(settings)
    output.selection(BUNDLE)
    with readable(file), file.open("rb") as opened:
        if not is_bundle(opened):
            raise RecordingError("it is no bundle of kvctl: kvctl debug bundle makes one")
        manifest = checked(opened)
    output.emit(Report(BUNDLE, [{"file": each["name"], **each} for each in manifest["files"]], answered=1))
    for key, text in (("failed", "not in the bundle"), ("left_out", "left out")):
        for each in manifest.get(key) or ():
            output.note(f"{text}: {each}")
    made = strftime("%Y-%m-%d %H:%M:%S %Z", localtime(int(manifest.get("made_at_ns") or 0) / 1e9))
    which = [name for name in ("redacted", "partial") if manifest.get(name)]
    output.note(", ".join([f"made by kvctl {manifest.get('kvctl')} at {made}", *which]))
