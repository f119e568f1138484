"""Terminal styles of values with the same meaning in all views, from the 16 colours that terminal themes define."""

from __future__ import annotations

STATES = {
    "Failed": "bold red",
    "Bootstrapping": "yellow",
    "WaitingForInput": "yellow",
    "Transferring": "cyan",
    "Success": "green",
}
ROLES = {"prefill": "magenta", "decode": "blue"}
PEER_STATES = {"ready": "green", "connecting": "yellow", "suspect": "yellow", "lost": "bold red", "refused": "bold red"}
AGENT_STATES = {
    "ok": "green",
    "draining": "yellow",
    "stopped": "bold red",
    "starved": "bold red",
    "ended": "yellow",
    "stale": "yellow",
}
LINK_STATES = {"active": "green", "up": "green", "down": "bold red"}
SEVERITIES = {"debug": "dim", "warning": "yellow", "error": "bold red"}
ALLOCATION_STATES = {"landed": "cyan", "scattering": "green", "revoking": "yellow", "quarantined": "bold red"}
VERDICTS = {"ok": "green", "info": "cyan", "warning": "yellow", "critical": "bold red", "unknown": "magenta"}
VERDICT_GLYPHS = {"ok": "✓", "info": "i", "warning": "!", "critical": "✗", "unknown": "?"}
