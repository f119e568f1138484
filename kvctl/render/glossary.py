"""Descriptions of the columns of all views, printed by `kvctl help columns COMMAND` and in the command pages."""

from __future__ import annotations

from collections.abc import Mapping

from kvctl.render.view import Column, View

_UNITS = {"_ns": "nanoseconds", "_bytes": "bytes", "_ratio": "ratio"}
_QUANTILES = {"p50": "Median", "p90": "90th percentile", "p99": "99th percentile"}

_STAGES = {
    "ready": "time from the first layer group of the chunk being ready until this part was ready",
    "gate": "wait for a grant and the watermark of the decode rank's ring",
    "queue": "wait for a transfer worker",
    "gather": "copy into the staging buffer",
    "post": "posting the write to the transfer engine",
    "wire": "time until the transfer engine reported completion",
    "arrive": "time until the decode rank received the notification",
    "scatter": "copy from the ring into the pages",
}

# Columns with the same meaning in all views; `_OF_VIEW` has the others and takes precedence.
_COMMON = {
    "agent": "Name of the agent that reports the row.",
    "agents": "Agents that the row is about.",
    "age": "Time since the start.",
    "aside": "Allocations of unresponsive writers: the watermark has passed them, but their bytes are not reused.",
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
    "incarnation": "Random id of the agent's process since its start.",
    "lane": "Transport lane between the two agents.",
    "lane_direct": "Mapping of the peer's GPU memory on this rank: nvlink, pcie, same device, fabric.",
    "landed": "Cells that have arrived at the decode rank.",
    "latency": "Decode rank: from open to success. Prefill rank: from the first ready part until the room is sent.",
    "layers": "Layers of the model, first and last included.",
    "muted": "Remaining time for which the finding is muted.",
    "name": "Name of the metric.",
    "nonce": "Number that distinguishes successive uses of a room number.",
    "origin": "Source of the value: default, file, environment or argument.",
    "path": "Transfer path of the parts: bulk, slice, staged or direct.",
    "paths": "Number of parts by transfer path.",
    "peer": "Name of the agent at the other end.",
    "planned": "Cells (writer, chunk, layer) in the transfer plan of this rank.",
    "protocol": "Lowest and highest supported version of the admin protocol.",
    "remedy": "Recommended action.",
    "role": "prefill or decode.",
    "room": "Number of the room (bootstrap_room).",
    "rooms": "Active rooms.",
    "rtt": "Round trip time.",
    "scattered": "Cells that are in their pages.",
    "sent": "Cells whose write the transfer engine reported complete.",
    "severity": "Severity of the finding.",
    "since": "Time since the problem began.",
    "state": "State.",
    "state_age": "Time in this state; unknown for a finished room.",
    "subject": "Agent, peer, room or other object of the finding.",
    "text": "Description.",
    "tokens": "Tokens of the prompt whose KV is transferred.",
    "uptime": "Time since the agent started.",
    "value": "Value.",
    "version": "Version of kvctl.",
    "writer": "Number of the prefill rank that writes the part.",
    "pid": "Process id.",
    "runtime": "Whether kvctl config set can change it while the agent runs.",
    "unit": "Unit of the value.",
    "key": "Name of the configuration key.",
}

_ROOMS = {
    "age": "Time since the room was opened, or until its end if it is finished.",
    "failure": "First cause of the failure: rank, code and text.",
    "finished_at": "Time at which the room finished.",
    "forward_done_at": "Prefill rank: end of the forward of the prompt.",
    "missing": "Agents whose next message ends this state.",
    "opened_at": "Time at which the room was opened.",
    "owed": "Decode rank: cells that have not landed, by writer.",
    "pages": "Pages of the room on this rank.",
    "parked": "Parts that wait for space in a ring.",
    "parts": "Parts transferred so far.",
    "peers": "Agents at the other end of the room.",
    "progress": "Cells done of cells planned: scattered on a decode rank, sent on a prefill rank.",
    "state": "Bootstrapping, WaitingForInput, Transferring, Success or Failed.",
}

_OF_VIEW: Mapping[str, Mapping[str, str]] = {
    "agents": {
        "capabilities": "Features of the agent's build and configuration.",
        "level": "Permission of this client: read, operate or admin.",
        "state": "ok, stale (the process of the socket has ended), or the reason for a missing answer.",
    },
    "bootstrap": {
        "asked_by": "Agents that queried this registry.",
        "decode_connected": "Decode ranks connected to every registered prefill rank.",
        "decode_ranks": "Decode ranks that queried this registry.",
        "expected": "Prefill ranks of the instance.",
        "missing": "Coordinates of prefill ranks that have not registered.",
        "names": "Prefill ranks that have registered.",
        "registered": "Number of prefill ranks that have registered.",
        "registry": "Address of the bootstrap registry.",
        "sizes": "Ranks along each axis: dp, pp, cp, tp.",
        "state": "complete, waiting, refused or silent.",
        "text": "The registry's description of the ranks that are missing or refused.",
        "unanswered": "Registered prefill ranks that do not answer kvctl.",
    },
    "bootstrap.ranks": {
        "connected": "Decode ranks connected to this prefill rank.",
        "rank": "Coordinates in the instance.",
        "state": "registered or missing.",
    },
    "check": {
        "check": "Area of the check.",
        "muted": "Muted findings, which do not affect the state.",
        "problems": "Findings, exceeded thresholds and agents that do not answer.",
        "state": "ok, warning, critical or unknown.",
        "values": "Measured values of the area, in seconds, bytes, ratios and counts.",
    },
    "config.key": {
        "choices": "Allowed values.",
        "environment": "Environment variable that sets the key.",
        "maximum": "Largest allowed value.",
        "minimum": "Smallest allowed value.",
        "sglang": "Corresponding flag or environment variable of SGLang.",
        "type": "Type of the value.",
    },
    "contexts": {
        "context": "Name of the context.",
        "endpoint": "Agents of the context.",
        "in_use": "Whether this is the current context.",
        "key": "Client key.",
        "labels": "Labels that select the agents.",
        "server_key": "Public key of the fleet.",
        "timeout": "Longest time to wait for an agent's answer.",
    },
    "doctor": {
        "next": "Command to run next.",
        "rank": "Position in the list, most severe first; empty for host checks that passed.",
    },
    "done": {
        "result": "Result of the action.",
        "subject": "Room, allocation, key or agent that the action changed.",
        "text": "Description of what the agent did.",
    },
    "events": {
        "kind": "Category of the event.",
        "sequence": "Number of the event in the agent's flight recorder.",
        "severity": "debug, info, warning or error.",
        "text": "Description of the event.",
    },
    "failed": {
        "after": "Time from open to failure.",
        "agents": "Agents that have the room.",
        "ago": "Time since the failure.",
        "bytes": "KV bytes transferred before the failure.",
        "failed_at": "Time at which the room failed.",
        "rank": "Agent on which the room failed first.",
        "text": "First cause of the failure.",
        "waits_for": "Agents that must answer before the room's memory can be reused.",
    },
    "health": {"severity": "info, warning or critical."},
    "health_codes": {
        "alert": "Equivalent Prometheus expression, if the metrics suffice.",
        "area": "Area of kvctl check that includes the code.",
        "means": "Meaning of the code.",
        "sees": "Symptoms.",
        "severity": "Highest severity of the code.",
    },
    "health_mutes": {
        "left": "Remaining time of the mute.",
        "made_at": "Time at which the mute was created.",
        "reason": "Reason for the mute.",
        "target": "Muted code, or code and subject.",
        "until_worse": "Findings when the mute was created; worse findings end the mute.",
    },
    "history": _ROOMS,
    "layers": {
        "bytes": "Bytes of the measured parts.",
        "exposed": "Mean transfer time of a part after the end of the forward.",
        "hidden": "Mean transfer time of a part before the end of the forward.",
        "parts": "Measured parts.",
        "share": "Share of the transfer time that was hidden by compute.",
        **{
            f"{stage}_{quantile}": f"{word} per part: {text}."
            for stage, text in _STAGES.items()
            for quantile, word in _QUANTILES.items()
        },
    },
    "metrics": {
        "count": "Observations of a histogram.",
        "kind": "counter, gauge or histogram.",
        "labels": "Labels of the sample.",
        "mean": "Mean of a histogram's observations.",
        "sum": "Sum of a histogram's observations.",
        "value": "Value of a counter or gauge.",
    },
    "metrics_schema": {"kind": "counter, gauge or histogram.", "labels": "Names of the labels."},
    "peers": {
        "control_queue": "Control messages to the peer that have not been sent yet.",
        "lane_descriptor": "Measured time per scattered descriptor of 512 bytes.",
        "lane_gb_per_s": "Measured rate of one large write, in GB/s.",
        "lane_kind": "Type of connection between GPUs, inferred from its rate.",
        "lane_measured_age": "Time since the lane was measured.",
        "lane_why_not": "Reason why the peer's GPU memory is not mapped on this rank.",
        "last_error": "Last error with this peer.",
        "last_heard": "Time since the last message from the peer.",
        "role": "Role of the peer.",
        "same_host": "Whether the peer's process is visible on this host, so that its end can be proven.",
        "process": "Process id and host of the peer.",
        "former": "Earlier processes with this name that may still write here, because their end is not proven.",
        "state": "connecting, ready, suspect, lost or refused.",
        "watermark_seen": "Prefill rank: round, tail and sequence of the watermark last received.",
        "watermark_sent": "Decode rank: round, tail and sequence of the watermark last sent.",
    },
    "peers.diff": {
        "a": "Value of the first agent.",
        "b": "Value of the second agent.",
        "factor": "Name of the compared setting.",
        "kind": "Origin of the setting.",
        "verdict": "incompatible, differs or same.",
    },
    "peers.matrix": {
        "decode": "Name of the decode agent.",
        "decode_sees": "State of the prefill agent, as reported by the decode agent.",
        "prefill": "Name of the prefill agent.",
        "prefill_sees": "State of the decode agent, as reported by the prefill agent.",
        "state": "State of the pair: the worse of the two.",
    },
    "probe": {
        "bytes": "Size of each descriptor.",
        "descriptor": "Additional time per descriptor.",
        "descriptors": "Descriptors in one write.",
        "gb_per_s": "Rate, in GB/s.",
        "write": "Time of one write.",
    },
    "room": {
        "at": "Wall clock of this machine.",
        "detail": "Details of the event.",
        "relative": "Milliseconds since the room was first opened.",
        "stage": "Stage of a part, or event of the room.",
    },
    "rooms": _ROOMS,
    "room-ranks": {"state": _ROOMS["state"]},
    "slow": _ROOMS,
    "stacks": {
        "at": "Innermost frame.",
        "daemon": "Whether the thread is a daemon thread.",
        "depth": "Number of frames.",
        "frames": "All frames, outermost first.",
        "ident": "Identifier of the thread.",
        "thread": "Name of the thread.",
    },
    "staging": {
        "ahead": "Bytes granted beyond the ring's size; their writers wait for a later round.",
        "buffers": "Size of the prefill rank's staging buffers.",
        "copies_waiting": "Landed parts that are not copied into the pages yet.",
        "copying": "Age of the oldest running copy.",
        "enabled": "Whether staging is configured.",
        "fallbacks": "Parts that did not fit and were sent on another path.",
        "gated": "Parts that wait for a grant or for the watermark.",
        "granted": "Allocations granted since the start.",
        "head": "Offset of the next allocation.",
        "high_water": "Largest number of ring bytes in use at once.",
        "live": "Live allocations.",
        "oldest": "Age of the oldest allocation, at which the watermark stands.",
        "oldest_room": "Room of the oldest allocation.",
        "oldest_state": "State of the oldest allocation.",
        "piece": "Size of one buffer piece.",
        "pieces": "Number of buffer pieces.",
        "pieces_high_water": "Largest number of pieces in use at once.",
        "pieces_used": "Pieces in use.",
        "refused": "Grants refused since the start.",
        "revoked": "Grants revoked since the start.",
        "ring": "Size of the decode rank's ring.",
        "round": "Number of times that the head has wrapped around the ring.",
        "tail": "Offset of the watermark.",
        "tail_age": "Time since the watermark moved.",
        "tail_round": "Round of the watermark.",
        "used": "Share of the ring in use.",
    },
    "staging_gated": {
        "age": "Time since the part was ready.",
        "asked_age": "Time since its grant was first requested.",
        "bytes": "Size of the part.",
        "requests": "Grant requests sent, including resends.",
        "waiting_for": "A grant, or the round and tail that the watermark must pass.",
    },
    "staging_map": {
        "age": "Time since the grant.",
        "aside": "Whether the watermark has passed the allocation because its writer does not respond.",
        "offset": "Offset of the allocation in the ring.",
        "posted": "Whether the write is already posted, so that the writer cannot give the region back.",
        "room_state": "State of the room on the decode rank.",
        "round": "Round of the ring that the allocation belongs to.",
        "serial": "Number of the allocation; never reused.",
        "size": "Size of the allocation.",
        "state": "granted, landed, revoking or quarantined.",
        "writer": "Name of the writing agent.",
    },
    "status": {
        "active": "Active rooms.",
        "backend": "Backend of the transfer engine.",
        "decisions": "Prefill rank: forwards, by the reason for pipelining them or not.",
        "device": "Device of the KV pool.",
        "done": "Rooms finished with success since the start.",
        "draining": "Whether it accepts no new rooms.",
        "failed": "Rooms failed since the start.",
        "gb_per_s": "Transfer rate while transfers are in progress, in GB/s.",
        "health": "Health codes of findings about this agent; ok if there are none.",
        "lanes": "Transport lanes in use.",
        "moved": "KV bytes sent (prefill) or landed (decode) since the start.",
        "p50": "Median latency of rooms.",
        "p90": "90th percentile of the latency of rooms.",
        "p99": "99th percentile of the latency of rooms.",
        "peers": "Peers, by state.",
        "pipeline": "Prefill rank: mode of layer pipelining.",
        "rank": "Coordinates on the parallelism axes of size 2 or more.",
        "ring": "Decode rank: share of the ring in use.",
        "ring_high_water": "Decode rank: largest number of ring bytes in use at once.",
        "ring_size": "Decode rank: size of the ring.",
        "rooms": "Active rooms, by state.",
        "rooms_per_s": "Rooms finished per second.",
        "transport": "Transfer engine.",
        "waiting_for": "Condition that must be met before the agent accepts rooms.",
    },
    "status_watch": {
        "agents": "Agents that answered.",
        "bootstrapping": "Rooms in Bootstrapping.",
        "done_per_s": "Rooms finished with success per second since the previous line.",
        "failed_per_s": "Rooms failed per second since the previous line.",
        "gb_per_s": "Transfer rate since the previous line, in GB/s.",
        "health": "Warnings and critical findings.",
        "p50": "Median over the ranks' median latencies.",
        "p99": "Largest of the ranks' 99th percentiles of latency.",
        "ring": "Share of all rings in use.",
        "transferring": "Rooms in Transferring.",
        "waiting": "Rooms in WaitingForInput.",
    },
    "version": {
        "component": "kvctl, or the name of the agent.",
        "python": "Version of Python.",
    },
}


def tables(view: View) -> list[tuple[str, View]]:
    """Returns the tables that a command with this view prints: (heading, view); the heading of the first is ""."""
    from kvctl.render import bootstrap, rooms, staging, status

    also = {
        "bootstrap": ("Ranks of each instance", bootstrap.RANKS),
        "room": ("Ranks of the room", rooms.RANKS),
        "staging": ("Gated parts", staging.GATED),
        "status": ("With -w", status.MOMENTS),
    }
    return [("", view), *([also[view.name]] if view.name in also else [])]


def entries(view: View) -> list[tuple[str, str, str, str]]:
    """Returns (header, name, unit, meaning) of each column."""
    return [(column.title, column.machine, unit(column), meaning(view, column) or "") for column in view.columns]


def meaning(view: View, column: Column) -> str | None:
    """Returns the description of a column of the view; None if the glossary has none."""
    return _OF_VIEW.get(view.name, {}).get(column.name) or _COMMON.get(column.name)


def unit(column: Column) -> str:
    """Returns the unit of a column in JSON, YAML, CSV and TSV; "" for columns without a unit."""
    return _UNITS.get(column.kind.value.suffix, "")
