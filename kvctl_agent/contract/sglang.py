"""Names of the SGLang plugin that both the plugin and `kvctl doctor` need."""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLE = "KVCTL_SGLANG"
MODES = ("backend", "replace", "observe", "off")
BACKEND = "kvctl"


def mode(environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns the plugin's mode that the environment sets; None if its value is no mode."""
    value = environ.get(VARIABLE, "").strip().lower() or MODES[0]
    return value if value in MODES else None
