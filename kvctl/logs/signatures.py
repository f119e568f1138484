"""The table of known failures, signatures.toml."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from kvctl.health.finding import Severity


@dataclass(frozen=True, slots=True)
class Signature:
    """One known failure.

    Attributes:
        code: its name.
        engine: program that writes the line.
        pattern: what the line contains; matches within one line.
        literals: a matching line contains at least one of these texts.
        cause: most likely cause.
        next: next step.
        report: URL of a public report, or the source file of the message.
    """

    code: str
    engine: str
    severity: Severity
    pattern: re.Pattern[bytes]
    literals: tuple[bytes, ...]
    cause: str
    next: str
    report: str


@cache
def signatures() -> tuple[Signature, ...]:
    """Returns all known failures, in the order of the table."""
    table = tomllib.loads(files(__package__).joinpath("signatures.toml").read_text())
    return tuple(
        Signature(
            **{
                **row,
                "engine": engine,
                "severity": Severity[row["severity"].upper()],
                "pattern": re.compile(row["pattern"].encode()),
                "literals": tuple(text.encode() for text in row["literals"]),
            }
        )
        for engine, rows in table.items()
        for row in rows
    )
