"""Renders a view for programs: TSV, CSV, JSON, JSON lines; integers in the unit that the column name ends in."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import orjson

from kvctl.client.faults import Fault
from kvctl.render.sanitize import escaped, json_escaped, printable_lines
from kvctl.render.view import Column, Row, View


def tsv(columns: Sequence[Column], rows: Iterable[Row], header: bool = True) -> str:
    r"""Formats rows as tab-separated lines; escapes backslashes and unprintable characters (`\t`, `\u202e`)."""
    lines = ["\t".join(column.machine for column in columns)] if header else []
    lines += ["\t".join(escaped(column.raw(row)) for column in columns) for row in rows]
    return "".join(f"{line}\n" for line in lines)


def comma_separated(columns: Sequence[Column], rows: Iterable[Row], header: bool = True) -> str:
    """Formats rows as CSV with the quoting of RFC 4180 and plain newlines; unprintable characters become U+FFFD."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if header:
        writer.writerow([column.machine for column in columns])
    writer.writerows([column.raw(row) for column in columns] for row in rows)
    return printable_lines(text.getvalue())


def projected(columns: Sequence[Column] | None, rows: Iterable[Row]) -> list[Any]:
    """Returns the rows for JSON: whole, or with `columns` only the values of these columns."""
    if columns is None:
        return list(rows)
    return [{column.machine: column.value(row) for column in columns} for row in rows]


def json_document(view: View, data: Sequence[Any], faults: Iterable[Fault], now_ns: int, indent: bool) -> str:
    """Formats the JSON document that all commands print: schema, time, data and errors."""
    document = {
        "schema": view.schema,
        "generated_at_ns": now_ns,
        "data": data,
        "errors": [asdict(fault) for fault in faults],
    }
    return _json(document, orjson.OPT_INDENT_2 if indent else 0)


def json_lines(data: Iterable[Any]) -> str:
    """Formats one JSON object per line."""
    return "".join(_json(item) for item in data)


def _json(value: Any, option: int = 0) -> str:
    return f"{json_escaped(orjson.dumps(value, option=option).decode())}\n"
