"""`kvctl replay`: a recording through the same machines again, every invariant watched."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from kvctl.client import bundle_reader
from kvctl.client.recording_reader import readable
from kvctl.commands.options import KvctlCommand, pass_settings
from kvctl.commands.output import Output
from kvctl.commands.settings import Settings
from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode
from kvctl.lab.replayer import replay as run_again
from kvctl.render.recordings import REPLAYED, blocks
from kvctl.render.report import Report

_PROGRESS_EVERY_S = 2.0


@click.command(
    cls=KvctlCommand,
    examples=[
        ("Run a recording again", "kvctl replay incident.kvrec"),
        (
            "Write a test that repeats the first broken invariant",
            "kvctl replay incident.kvrec --write-test test_incident.py",
        ),
    ],
)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--agent", "agents", multiple=True, metavar="NAME", help="Only this agent's inputs. Repeatable.")
@click.option("--shrink/--no-shrink", default=True, show_default=True, help="Make the trace of a breach shorter.")
@click.option(
    "--shrink-seconds",
    type=click.FloatRange(min=0.1),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to try.",
)
@click.option(
    "--write-test",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write a pytest file that repeats the first breach (test_….py).",
)
@pass_settings
def replay(
    settings: Settings,
    file: Path,
    agents: tuple[str, ...],
    shrink: bool,
    shrink_seconds: float,
    write_test: Path | None,
) -> None:
    """Run what kvctl record or kvctl debug bundle saved through the same machines and name the first broken invariant.

    After every input a watch that knows nothing of the machines' own books looks at what came of it. Exit code 0: all
    of it is clean; 1: an invariant is broken; 6: the recording is of another build.
    """
    output = Output(settings)
    output.selection(REPLAYED)
    with _recording(file) as path:
        verdicts = run_again(path, agents, shrink_seconds if shrink else None, write_test, _Progress(output))
    if not verdicts:
        raise CliError(f"{file}: it holds no inputs of machines (a redacted bundle never does): nothing to replay")
    broken = [verdict for verdict in verdicts if verdict["breach"] is not None]
    for verdict in verdicts:
        for note in verdict["notes"]:
            output.note(f"{verdict['agent']}: {note}")
    if write_test is not None and not broken:
        output.note(f"nothing is broken, so {write_test} was not written")
    output.emit(
        Report(
            REPLAYED,
            verdicts,
            len(verdicts),
            objects=lambda kept: list(kept),
            blocks=lambda kept, _: blocks(kept),
        )
    )
    raise click.exceptions.Exit(ExitCode.FAILED if broken else ExitCode.OK)


class _Progress:
    """Prints a remark every two seconds: short replays print none."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._printed_at = time.monotonic()

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if now - self._printed_at >= _PROGRESS_EVERY_S:
            self._printed_at = now
            self._output.note(f"replay: {text}")


@contextmanager
def _recording(file: Path) -> Iterator[Path]:
    """The file, or that of the recording in it where it is a bundle."""
    bundled = _bundled(file)
    if bundled is None:
        yield file
        return
    with tempfile.NamedTemporaryFile(suffix=".kvrec") as copy:
        copy.write(bundled)
        copy.flush()
        try:
            yield Path(copy.name)
        except CliError as error:
            raise CliError(str(error).replace(copy.name, str(file)), error.code) from None


def _bundled(file: Path) -> bytes | None:
    with readable(file), file.open("rb") as opened:
        return bundle_reader.recording(opened) if bundle_reader.is_bundle(opened) else None
