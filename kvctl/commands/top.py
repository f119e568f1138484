"""`kvctl top`: shows a live view of the fleet in a terminal, or writes one screen of it to a file."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import click

from kvctl.commands.options import Parsed, command, duration
from kvctl.commands.queries import no_agent, source
from kvctl.commands.settings import DEFAULT_TIMEOUT, Settings
from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode
from kvctl.render.selection import ExpressionError, select
from kvctl.render.units import parse_seconds
from kvctl.tui import VIEWS

_SNAPSHOT_SUFFIXES = (".svg", ".txt")
_MIN_SIZE = (60, 16)
_MAX_SIZE = (500, 200)
_MIN_INTERVAL_NS = 100_000_000


def _size(text: str) -> tuple[int, int]:
    """Parses a screen size such as 120x40 to (columns, rows)."""
    columns, _, rows = text.partition("x")
    if not columns.isdecimal() or not rows.isdecimal():
        raise ValueError(f"{text!r} is not a size: write COLUMNSxROWS, as in 120x40")
    size = (int(columns), int(rows))
    if any(not low <= each <= high for each, low, high in zip(size, _MIN_SIZE, _MAX_SIZE, strict=True)):
        raise ValueError(f"{text} is not between {_MIN_SIZE[0]}x{_MIN_SIZE[1]} and {_MAX_SIZE[0]}x{_MAX_SIZE[1]}")
    return size


def _check_suffix(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    if value is not None and value.suffix not in _SNAPSHOT_SUFFIXES:
        raise click.BadParameter(
            f"{value}: the suffix determines the format, {', '.join(_SNAPSHOT_SUFFIXES)}", ctx, param
        )
    return value


@command(
    examples=[
        ("Live view; ? shows the keys", "kvctl top"),
        ("Rooms older than a second", "kvctl top --view rooms --filter 'age>1s'"),
        ("One screen as a picture", "kvctl top --snapshot fleet.svg --size 160x50"),
        ("Play a recording", "kvctl top --from fleet.kvrec"),
    ]
)
@click.option("--view", type=click.Choice(VIEWS), default="overview", show_default=True, help="First view.")
@click.option(
    "--interval",
    type=duration("100ms"),
    default="1s",
    show_default=True,
    metavar="TIME",
    help="Time between readings, as -w.",
)
@click.option(
    "--snapshot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.svg|txt",
    callback=_check_suffix,
    help="Write one screen to a file; needs no terminal.",
)
@click.option(
    "--size",
    type=Parsed("size", _size),
    default="120x40",
    show_default=True,
    metavar="CxR",
    help="Size of the snapshot.",
)
def top(settings: Settings, view: str, interval: int, snapshot: Path | None, size: tuple[int, int]) -> None:
    """Live view: overview, rooms, staging, layers, peers, events, failed and ended rooms. ? shows the keys, q quits.

    Agents that do not answer within an interval (or --timeout, if given) keep their rows, dimmed and with their age,
    until they answer again. --from FILE replays a recording, [ and ] seek in it. --filter and --sort-by apply to the
    first view; / also accepts a text that rows must contain. No key changes anything in the fleet: kvctl rooms abort
    and kvctl staging release do.
    """
    if snapshot is None and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("kvctl top needs a terminal; without one: --snapshot FILE.svg")
    if snapshot is None and os.environ.get("TERM") in {None, "", "dumb"}:
        raise click.UsageError("this terminal (TERM) is not supported; kvctl status -w writes a line per reading")
    from kvctl.tui.app import TopApp
    from kvctl.tui.feed import Feed
    from kvctl.tui.frame import Mode
    from kvctl.tui.listings import VIEW_OF, TableQuery

    interval = interval if settings.watch_ns is None else max(settings.watch_ns, _MIN_INTERVAL_NS)
    query = TableQuery(" & ".join(settings.filters), settings.sort_by or "")
    try:
        select(VIEW_OF[view], filters=settings.filters)
        query.selection(VIEW_OF[view])
    except ExpressionError as error:
        raise click.UsageError(str(error)) from error
    # A recording is played from its start; a snapshot shows its end. Its last moment may come too soon after the one
    # before for rates, so a snapshot begins two before it.
    first = 0 if snapshot is None else -3
    # An agent that hangs must not delay the rows of others, unless the user chose the timeout.
    is_default = snapshot is None and settings.timeout_ns == parse_seconds(DEFAULT_TIMEOUT)
    timeout_ns = min(settings.timeout_ns, interval) if is_default else settings.timeout_ns
    watch_ns = interval if snapshot is None else None
    fleet = source(replace(settings, watch_ns=watch_ns, timeout_ns=timeout_ns), first)
    name = "" if settings.from_file is None else settings.from_file.name
    mode = Mode(source=name, no_agents=lambda survey: no_agent(settings, survey).message)
    app = TopApp(Feed(fleet, interval), mode, view, query=query)
    if snapshot is not None:
        from kvctl.tui.snapshot import snapshot as take

        take(app, snapshot, size, settings.timeout_ns + 2 * interval)
        if not app.store.agents:
            survey = app.store.survey
            reason = app.store.problem or (
                no_agent(settings, survey).message if survey else "no agent answered in time"
            )
            raise CliError(f"{snapshot} shows an empty fleet: {reason}", ExitCode.NO_AGENT)
        return
    from kvctl.tui.terminal import TerminalWatch

    with TerminalWatch(sys.stdin.fileno()):
        app.run()
    raise click.exceptions.Exit(app.return_code or ExitCode.OK)
