"""`kvctl debug bundle`: saves a recording for a bug report, as `kvctl record` does, with two snapshots."""

from __future__ import annotations

from pathlib import Path
from time import strftime

import click

from kvctl.commands.options import KvctlGroup
from kvctl.commands.record import redact_option, save
from kvctl.commands.settings import Settings

_APART_NS = 2_000_000_000
_NEVER_NS = 1 << 62  # the second snapshot is the one at the end


@click.group(cls=KvctlGroup)
def debug() -> None:
    """Bundles: recordings for bug reports."""


@debug.command(
    short_help="Save a recording for a bug report.",
    examples=[
        ("A bundle for a report to others", "kvctl debug bundle --redact"),
        ("Redact a bundle that exists", "kvctl debug bundle --from incident.kvrec public.kvrec --redact"),
    ],
)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), required=False)
@redact_option
def bundle(settings: Settings, file: Path | None, redact: bool) -> None:
    """Save two snapshots, two seconds apart, to FILE, by default kvctl-bundle-TIME.kvrec in this directory.

    A bundle is a recording as of kvctl record: what the reading commands show, also of workers that have ended and left
    a black box, for kvctl doctor and every reading command with --from FILE. It contains names and addresses, which
    --redact replaces, and no KV.
    """
    save(settings, file or Path(strftime("kvctl-bundle-%Y%m%d-%H%M%S.kvrec")), _APART_NS, _NEVER_NS, redact)
