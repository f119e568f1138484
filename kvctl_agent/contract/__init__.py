"""Interface between the agent and the command line: names, types and wire constants.

Uses the standard library only, so that `kvctl` imports it in milliseconds. Every name that appears in help, JSON,
metrics, completions or docs is declared here once.
"""

from __future__ import annotations

VERSION = "0.1.0"
"""Version of both packages."""
