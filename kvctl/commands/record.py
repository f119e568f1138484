"""`kvctl record`: the inputs of all agents' machines into one file, to be run again by `kvctl replay`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from kvctl.client.fleet import Fleet
from kvctl.client.recordings import Saved, save_recording
from kvctl.commands.options import KvctlCommand, pass_settings
from kvctl.commands.output import Output
from kvctl.commands.reading import conclude
from kvctl.commands.settings import Settings
from kvctl.views.recordings import RECORDED
from kvctl.views.report import Report


class _FileCommand(KvctlCommand):
    """After this command `-o` names its file, as everywhere else where a file is made; before it, the format."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        formats = {id(param) for param in self._globals if param.name == "output"}
        self._globals = [param for param in self._globals if id(param) not in formats]
        self.params = [param for param in self.params if id(param) not in formats]


@click.command(cls=_FileCommand)
@click.option(
    "-o",
    "--output",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    metavar="FILE",
    help="Where the recording goes; an old one of that name is replaced.",
)
@pass_settings
def record(settings: Settings, path: Path) -> None:
    """Save what the agents' machines were told lately, from all agents or those that -e and -l choose.

    Agents keep their last inputs (record_inputs in their configuration) whether anybody records or not, so this is for
    the moment after something has gone wrong. kvctl replay runs the file. Page numbers, names and addresses are in it,
    no KV. To choose the format of what is printed, give -o before the command, too: kvctl -o json record -o FILE.
    """
    output = Output(settings)
    output.selection(RECORDED)
    with Fleet(settings.endpoints, settings.labels, settings.timeout_ns, settings.keys) as fleet:
        saving = save_recording(fleet, path)
    report = Report(RECORDED, [asdict(saved) for saved in saving.saved], len(saving.saved), saving.faults)
    report.notes += [note for saved in saving.saved if (note := _lack(saved))]
    if saving.saved:
        report.notes.append(f"saved to {path}: kvctl replay {path}")
        output.emit(report)
    raise click.exceptions.Exit(conclude(output, settings, saving.survey, report))


def _lack(saved: Saved) -> str:
    """What is not in the file, and why; "" where nothing is missing."""
    if saved.fault:
        return f"{saved.agent}: {saved.missed} inputs were not recorded, its recording has ended: {saved.fault}"
    if saved.missed:
        return f"{saved.agent}: {saved.missed} inputs were not recorded, too many rooms were open for a checkpoint"
    return "" if saved.inputs else f"{saved.agent}: records nothing (record_inputs is 0)"
