"""Writes data as YAML that YAML 1.1 and 1.2 readers interpret alike."""

from __future__ import annotations

from typing import Any

import yaml

_NEVER_FOLD = 1 << 30
# Start of texts that some YAML version reads as numbers: `12e4`, an incarnation, is a number in YAML 1.2 only.
_LIKE_A_NUMBER = frozenset("0123456789+-.")


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """YAML dumper that indents lists and quotes every text that begins like a number."""


def _text(dumper: _Dumper, value: str) -> Any:
    style = '"' if value[:1] in _LIKE_A_NUMBER else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def dumped(value: Any) -> str:
    """Formats one document; unprintable and non-ASCII characters are escaped."""
    text = _dump(value, allow_unicode=True)
    return text if text.replace("\n", "").isprintable() else _dump(value, allow_unicode=False)


def _dump(value: Any, allow_unicode: bool) -> str:
    text: str = yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=allow_unicode,
        explicit_start=True,
        default_flow_style=False,
        width=_NEVER_FOLD,
    )
    return text
