"""Every health code, in the order in which they explain each other: what comes first is more often the cause."""

from __future__ import annotations

from kvctl.health.finding import Code

CODES: tuple[Code, ...] = ()

CODES_BY_NAME: dict[str, Code] = {code.name: code for code in CODES}
