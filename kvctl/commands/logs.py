"""`kvctl logs`: names the known failures in the logs of engines, with cause and next step."""

from __future__ import annotations

from collections.abc import Sequence
from io import BufferedReader
from typing import Any, cast

import click

from kvctl.client.faults import Fault, FaultCode, lines
from kvctl.commands.options import command
from kvctl.commands.output import Output
from kvctl.commands.settings import Settings
from kvctl.exit_codes import ExitCode
from kvctl.health.finding import counted
from kvctl.logs.scan import LogError, Match, Scan
from kvctl.render import palette
from kvctl.render.findings import headline, labelled
from kvctl.render.report import Block, Line, Report, Text
from kvctl.render.view import Column, Kind, Row, View, Width

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

    FILE is a log of SGLang, vLLM, NIXL, UCX, Mooncake or NCCL, also compressed by gzip; - is stdin. What
    matters to the transfer of KV caches is searched for: lost servers, timeouts, expired leases, servers that do not
    fit together, transports that are missing, memory that cannot be registered. A line that is not known is not
    reported.

    Contacts no agent. Exit codes: 0 nothing found, 1 a known failure, 7 a log could not be read to its end, whatever
    was found.
    """
    if settings.watch_ns is not None or settings.from_file is not None:
        raise click.UsageError("logs reads FILE once: omit -w and --from")
    output = Output(settings)
    output.selection(LOGS)
    scan, faults = Scan(), []
    for name in files:
        try:
            with click.open_file(name, "rb") as file:
                scan.read(name, cast(BufferedReader, file))
        except (LogError, OSError) as error:
            text = error.strerror if isinstance(error, OSError) else None
            faults.append(Fault(name, FaultCode.PROTOCOL, text or str(error)))
    rows = [_row(match) for match in scan.found()]
    examined = counted(len(files), "file")
    report = Report(
        LOGS, rows, len(files), faults, blocks=lambda kept, width: _blocks(rows, kept, width, examined, not faults)
    )
    output.emit(report)
    for line in lines(faults):
        output.error(line)
    found = ExitCode.FAILED if rows else ExitCode.OK
    raise click.exceptions.Exit(ExitCode.PARTIAL if faults else found)


def _row(match: Match) -> dict[str, Any]:
    signature = match.signature
    return {
        "severity": signature.severity.label,
        "lines": match.count,
        **{key: getattr(signature, key) for key in ("code", "engine", "cause", "next", "report")},
        **{key: getattr(match, key) for key in ("file", "line", "text", "last")},
    }


def _blocks(rows: Sequence[Row], kept: Sequence[Row], width: int, examined: str, complete: bool) -> list[Block]:
    nothing = ("✓ no known failure", palette.VERDICTS["ok"]) if complete else ("no known failure in what was read", "")
    found: list[Block] = [Text([[headline(rows, complete) if rows else nothing, (f"   {examined}", "dim")]])]
    if rows and not kept:
        found.append(Text([[("no rows match --filter", "dim")]]))
    for number, each in enumerate(kept, 1):
        severity = each["severity"]
        style, glyph = palette.VERDICTS[severity], f"{palette.VERDICT_GLYPHS[severity]} {severity}"
        where = f"{each['file']}:{each['line']}" + (f" and {each['lines'] - 1} more" if each["lines"] > 1 else "")
        title = [(f"{number}. ", "bold"), (glyph, style), (f"  {each['code']}  ", "bold"), (where, "")]
        described: list[Line] = [title]
        for key, label in (("text", "line"), ("cause", "cause"), ("next", "next"), ("report", "report")):
            described += labelled(label, each[key], width)
        found.append(Text(described))
    return found
