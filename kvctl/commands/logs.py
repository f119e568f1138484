"""`kvctl logs`: names the known failures in the logs of engines, with cause and next step."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

import click

from kvctl.commands.options import command
from kvctl.commands.output import Output
from kvctl.commands.settings import Settings
from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode
from kvctl.health.finding import counted
from kvctl.logs.scan import LogError, Match, scan
from kvctl.logs.signatures import signatures
from kvctl.render import palette
from kvctl.render.findings import headline, labelled
from kvctl.render.report import Block, Report, Text
from kvctl.render.view import Column, Kind, Row, View, Width

_LABEL = 10
_STDIN = "-"

LOGS = View(
    "logs",
    (
        Column("severity", Kind.VERDICT, help="Severity of the failure.", styles=palette.VERDICTS),
        Column("code", help="Name of the known failure."),
        Column("engine", help="Program that wrote the line."),
        Column("lines", Kind.COUNT, help="Number of lines about it."),
        Column("file", width=Width.NORMAL, help="File with the first of these lines; - is stdin."),
        Column("line", Kind.COUNT, Width.NORMAL, "Number of that line in the file."),
        Column("cause", Kind.SENTENCE),
        Column("next", Kind.SENTENCE, help="Next step."),
        Column("text", Kind.SENTENCE, Width.WIDE, "The first line."),
        Column("last", Kind.SENTENCE, Width.WIDE, "The last line."),
        Column("report", width=Width.WIDE, help="Public report, or source of the message."),
    ),
    empty="no known failure",
)


@command(
    view=LOGS,
    examples=[
        ("The logs of two servers", "kvctl logs prefill.log decode.log"),
        ("The log that another command prints", "kvctl logs -"),
        ("For a script: the names of the failures", "kvctl logs server.log.gz -o tsv --columns code,lines"),
    ],
)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, allow_dash=True))
def logs(settings: Settings, files: tuple[str, ...]) -> None:
    """Name the known failures in the logs of engines, with the line, its cause and the next step.

    FILE is a log of SGLang, vLLM, NIXL, UCX, Mooncake or NCCL, also compressed by gzip; - is stdin. What matters to the
    transfer of KV caches is searched for: lost servers, timeouts, expired leases, servers that do not fit together,
    transports that are missing, memory that cannot be registered. A line that is not known is not reported.

    Contacts no agent. Exit codes: 0 nothing found, 1 a known failure.
    """
    if settings.watch_ns is not None or settings.from_file is not None:
        raise click.UsageError("logs reads FILE once: omit -w and --from")
    output = Output(settings)
    output.selection(LOGS)
    try:
        rows = [_row(match) for match in scan(_opened(files), signatures())]
    except LogError as error:
        raise CliError(str(error)) from None
    report = Report(
        LOGS,
        rows,
        len(files),
        blocks=lambda kept, width: _blocks(kept, width, counted(len(files), "file")),
        wrong=bool(rows),
    )
    output.emit(report)
    raise click.exceptions.Exit(ExitCode.FAILED if rows else ExitCode.OK)


def _opened(names: Sequence[str]) -> Iterator[tuple[str, BufferedReader]]:
    """Yields names and open files, each of which is closed when the next one is asked for."""
    for name in names:
        if name == _STDIN:
            yield name, cast(BufferedReader, sys.stdin.buffer)
            continue
        try:
            file = Path(name).open("rb")  # noqa: SIM115
        except OSError as error:
            raise LogError(f"{name}: {error.strerror}") from None
        with file:
            yield name, file


def _row(match: Match) -> dict[str, Any]:
    signature = match.signature
    return {
        "severity": signature.severity.label,
        "code": signature.code,
        "engine": signature.engine,
        "lines": match.count,
        "file": match.file,
        "line": match.line,
        "cause": signature.cause,
        "next": signature.next,
        "text": match.text,
        "last": match.last,
        "report": signature.report,
    }


def _blocks(kept: Sequence[Row], width: int, examined: str) -> list[Block]:
    head = headline(kept, True) if kept else ("✓ no known failure", palette.VERDICTS["ok"])
    found: list[Block] = [Text([[head, (f"   {examined}", "dim")]])]
    for number, each in enumerate(kept, 1):
        severity = each["severity"]
        style, glyph = palette.VERDICTS[severity], f"{palette.VERDICT_GLYPHS[severity]} {severity}"
        where = f"{each['file']}:{each['line']}" + (f" and {each['lines'] - 1} more" if each["lines"] > 1 else "")
        found.append(
            Text(
                [
                    [(f"{number}. ", "bold"), (glyph, style), (f"  {each['code']}  ", "bold"), (where, "")],
                    *(
                        line
                        for key, label in (("text", "line"), ("cause", "cause"), ("next", "next"), ("report", "report"))
                        for line in labelled(label, each[key], width, _LABEL)
                    ),
                ]
            )
        )
    return found
