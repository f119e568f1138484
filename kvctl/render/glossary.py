"""Descriptions of columns that many views share, and the glossary of a command's tables."""

from __future__ import annotations

from collections.abc import Iterator

from kvctl.render.view import View

_UNITS = {"_ns": "nanoseconds", "_bytes": "bytes", "_ratio": "ratio"}

# By column name; the `help` of a column takes precedence.
COMMON = {
    "agent": "Name of the agent that reports the row.",
    "agents": "Agents that the row is about.",
    "at": "Wall clock of this machine, corrected by the agent's clock offset.",
    "bytes": "KV bytes moved so far.",
    "cause": "Description of the problem.",
    "chunk": "Number of the chunk in the room's chunk grid.",
    "clock_error": "Bound of the error of the clock offset.",
    "clock_offset": "Clock of the agent minus the reference clock.",
    "code": "Health or failure code; see kvctl health explain CODE.",
    "default": "Default value.",
    "differences": "Settings in which the two agents are incompatible.",
    "endpoint": "Address of the agent.",
    "errors": "Errors between the two agents since this agent started.",
    "evidence": "Measured values that support the finding.",
    "exposed": "Transfer time after the end of the forward, not hidden by compute.",
    "help": "Description.",
    "hidden": "Transfer time before the end of the forward, hidden by compute.",
    "host": "Name of the agent's host.",
    "incarnation": "Random id of the agent's process since its start.",
    "key": "Name of the configuration key.",
    "landed": "Cells that have arrived at the decode rank.",
    "lane": "Transport lane between the two agents.",
    "lane_direct": "Mapping of the peer's GPU memory on this rank: nvlink, pcie, same device, fabric.",
    "layers": "Layers of the model, first and last included.",
    "name": "Name of the metric.",
    "nonce": "Number that distinguishes successive uses of a room number.",
    "origin": "Source of the value: default, engine (its integration's default), automatic (by the agent), file, "
    "environment or argument.",
    "paths": "Number of parts by transfer path.",
    "peer": "Name of the agent at the other end.",
    "pid": "Process id.",
    "protocol": "Lowest and highest supported version of the admin protocol.",
    "remedy": "Recommended action.",
    "role": "prefill or decode.",
    "room": "Number of the room (bootstrap_room).",
    "rtt": "Round trip time.",
    "runtime": "Whether kvctl config set can change it while the agent runs.",
    "since": "Time since the problem began.",
    "state_age": "Time in this state; unknown for a finished room.",
    "subject": "Agent, peer, room or other object of the finding.",
    "tokens": "Tokens of the prompt after the prefix; those of whole pages if the engine did not pass its length.",
    "unit": "Unit of the value.",
    "uptime": "Time since the agent started.",
    "value": "Value.",
    "version": "Version of kvctl.",
}


def tables(view: View) -> list[tuple[str, View]]:
    """Returns the tables that a command with this view prints, as (heading, view); the first heading is ""."""
    return [("", view), *view.also]


def entries(view: View) -> Iterator[tuple[str, str, str, str]]:
    """Yields (header, name in TSV and CSV, unit or "", description) of each column."""
    for column in view.columns:
        unit = _UNITS.get(column.kind.value.suffix, "")
        yield column.title, column.machine, unit, column.help or COMMON.get(column.name, "")
