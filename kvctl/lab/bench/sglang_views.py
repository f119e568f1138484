"""Table of a bench of SGLang servers, and the lines around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvctl.lab.bench.variants import pages_text
from kvctl.lab.bench.views import COLUMNS, DeltaColumn, nanoseconds, rounds_text, shape_words
from kvctl.render.report import Block, Grid, Text
from kvctl.render.view import Column, Kind, Row, View, Width

_SIDE = "Transfer backend, with the settings of its servers; undivided: one server, without a transfer."

SERVERS = View(
    "bench-servers",
    (
        Column("side", help=_SIDE),
        Column("tokens", path="tokens_drawn", help="Tokens of a prompt."),
        COLUMNS["concurrency"],
        Column("ttft_mean", Kind.DURATION, path=nanoseconds("ttft_ms", "mean"), header="TTFT"),
        DeltaColumn("ttft_delta", Kind.RATIO, path="ttft_delta_ratio", header="Δ TTFT"),
        Column("ttft_p99", Kind.DURATION, Width.NORMAL, path=nanoseconds("ttft_ms", "p99"), header="P99"),
        Column("tpot", Kind.DURATION, path=nanoseconds("tpot_ms", "mean")),
        Column("output_tokens_per_s", Kind.NUMBER, header="TOK/S", help="Generated tokens."),
        DeltaColumn("delta", Kind.RATIO, path="delta_ratio", header="Δ TOK/S"),
        Column("overhead", Kind.RATIO, Width.NORMAL, "Mean TTFT beyond that of undivided.", path="overhead_ratio"),
        DeltaColumn("tpot_delta", Kind.RATIO, Width.NORMAL, path="tpot_delta_ratio", header="Δ TPOT"),
        Column("rooms", Kind.COUNT, Width.WIDE, "Measured requests."),
        Column("rooms_per_s", Kind.NUMBER, Width.WIDE, header="REQUESTS/S"),
        Column("tokens_per_s", Kind.NUMBER, Width.WIDE, "Tokens of prompts.", header="PROMPT TOK/S"),
        Column("verified", Kind.FLAG, Width.WIDE, "Whether the tokens were those of undivided."),
    ),
    empty="no side completed a round",
)

SERVERS_PLAN = View(
    "bench-servers-plan",
    (
        Column("side", help=_SIDE),
        Column("server", help="prefill, decode, or server, which is the undivided one."),
        Column("command", help="Its variables and its command line, for a shell."),
    ),
    empty="no servers",
)


def plan_blocks(rows: Sequence[Row]) -> list[Block]:
    """Returns the terminal output of a plan: command lines, which a table would cut."""
    lines = [
        [(f"# {row['side']}: {row['server']}", "bold")] if title else [(row["command"], "")]
        for row in rows
        for title in (True, False)
    ]
    return [Text(lines)]


def blocks(rows: Sequence[Row], document: Mapping[str, Any]) -> list[Block]:
    """Returns the terminal output: the setup, the table, and how to read it.

    Args:
        document: the result as `--save` writes it.
    """
    first = document["runs"][-1]  # not the undivided server
    setup = [
        f"prefill {first['prefill']} → decode {first['decode']} of SGLang {document['env']['sglang']}",
        document["shape"]["model"],
        ", ".join(shape_words(document["shape"])),
        pages_text(first),
        f"{first['output_tokens']} tokens generated for each request",
    ]
    verdict = ("tokens were not compared", "yellow")
    if document["verified"] is not None:
        equal = ("all sides in the table generated the same tokens", "green")
        verdict = equal if document["verified"] else ("TOKENS DIFFER", "bold red")
    foot = [(line, "") for line in rounds_text(rows, document["turns"])]
    return [
        Text([[(" · ".join(filter(None, setup)), "")]]),
        Grid(SERVERS, rows),
        Text([[line] for line in (*foot, verdict)]),
    ]
