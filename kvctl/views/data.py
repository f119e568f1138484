"""Renders a view for programs: TSV, CSV, JSON, JSON lines. Raw integers in the unit that the header's name ends in."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import orjson

from kvctl.client.faults import Fault
from kvctl.views.kinds import raw
from kvctl.views.view import Column, Row, View

# Control characters may come from a peer; a terminal would obey them.
_ESCAPES = str.maketrans(
    {
        **{chr(code): f"\\x{code:02x}" for code in (*range(32), 127)},
        "\\": "\\\\",
        "\t": "\\t",
        "\n": "\\n",
        "\r": "\\r",
    }
)


def tsv(columns: Sequence[Column], rows: Iterable[Row], header: bool = True) -> str:
    """Tab-separated lines; tabs, newlines and backslashes inside a value are escaped."""
    lines = ["\t".join(column.machine for column in columns)] if header else []
    lines += ["\t".join(raw(column.value(row)).translate(_ESCAPES) for column in columns) for row in rows]
    return "".join(f"{line}\n" for line in lines)


def comma_separated(columns: Sequence[Column], rows: Iterable[Row], header: bool = True) -> str:
    """CSV as RFC 4180 quotes it, with plain newlines."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if header:
        writer.writerow([column.machine for column in columns])
    writer.writerows([raw(column.value(row)) for column in columns] for row in rows)
    return text.getvalue()


def projected(columns: Sequence[Column] | None, rows: Iterable[Row]) -> list[Any]:
    """Whole rows, or only the named columns of them."""
    if columns is None:
        return list(rows)
    return [{column.machine: column.value(row) for column in columns} for row in rows]


def json_document(view: View, data: Sequence[Any], faults: Iterable[Fault], now_ns: int, indent: bool) -> str:
    """The envelope every command shares."""
    envelope = {
        "schema": view.schema,
        "generated_at_ns": now_ns,
        "data": data,
        "errors": [asdict(fault) for fault in faults],
    }
    return orjson.dumps(envelope, option=orjson.OPT_INDENT_2 if indent else 0).decode() + "\n"


def json_lines(data: Iterable[Any]) -> str:
    """One object a line."""
    return "".join(f"{orjson.dumps(item).decode()}\n" for item in data)
