"""Renders a view for programs: TSV, CSV, JSON, JSON lines, YAML; integers in the unit that the column name ends in."""

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

_NUMBER_STARTS = frozenset("0123456789+-.")


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
    """Returns the rows for JSON and YAML: whole, or with `columns` only the values of these columns."""
    if columns is None:
        return list(rows)
    return [{column.machine: column.value(row) for column in columns} for row in rows]


def json_document(view: View, data: Sequence[Any], faults: Iterable[Fault], now_ns: int, indent: bool) -> str:
    """Formats the JSON document that all commands print: schema, time, data and errors."""
    return _json(_envelope(view, data, faults, now_ns), orjson.OPT_INDENT_2 if indent else 0)


def yaml_document(view: View, data: Sequence[Any], faults: Iterable[Fault], now_ns: int) -> str:
    """Formats the same document as YAML; it begins with `---`, so that documents can be concatenated."""
    # Converted to JSON and back, so that both formats have the same types.
    document = orjson.loads(orjson.dumps(_envelope(view, data, faults, now_ns)))
    text = _yaml(document, allow_unicode=True)
    return text if text.replace("\n", "").isprintable() else _yaml(document, allow_unicode=False)


def _yaml(document: Any, allow_unicode: bool) -> str:
    """Formats YAML that readers of YAML 1.1 and 1.2 interpret alike: quotes every text that begins like a number.

    For example the incarnation `12e4` is a number in YAML 1.2 only.
    """
    import yaml  # takes 30 ms to import

    class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
        pass

    def represent(dumper: Dumper, value: str) -> Any:
        style = '"' if value[:1] in _NUMBER_STARTS else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, represent)
    text: str = yaml.dump(
        document,
        Dumper=Dumper,
        sort_keys=False,
        allow_unicode=allow_unicode,
        explicit_start=True,
        default_flow_style=False,
        width=1 << 30,  # never fold lines
    )
    return text


def _envelope(view: View, data: Sequence[Any], faults: Iterable[Fault], now_ns: int) -> dict[str, Any]:
    return {
        "schema": view.schema,
        "generated_at_ns": now_ns,
        "data": data,
        "errors": [asdict(fault) for fault in faults],
    }


def json_lines(data: Iterable[Any]) -> str:
    """Formats one JSON object per line."""
    return "".join(_json(item) for item in data)


def _json(value: Any, option: int = 0) -> str:
    return f"{json_escaped(orjson.dumps(value, option=option).decode())}\n"
