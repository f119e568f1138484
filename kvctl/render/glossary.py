"""What each column means: rendered into the command pages, and printed by `kvctl help columns COMMAND`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvctl.render.view import Column, View
from kvctl_agent.contract.states import STAGES

_UNITS = {"_ns": "nanoseconds", "_bytes": "bytes", "_ratio": "ratio"}
_QUANTILES = {"p50": "Median", "p90": "90th percentile", "p99": "99th percentile"}

_STAGES = {
    "ready": "how much later than its chunk's first layer group a part was computed",
    "gate": "wait until the decode rank's ring had room",
    "queue": "wait for a transfer worker",
    "gather": "copy into the staging buffer",
    "post": "hand over to the transfer engine",
    "wire": "until the engine reported the write complete",
    "arrive": "until the decode rank was notified",
    "scatter": "copy from the ring into the pages",
}

# Columns with one meaning wherever they appear; `_OF_VIEW` has the others.
_COMMON = {
    "agent": "Name of the agent that reports the row.",
    "agents": "Agents that the row is about.",
    "age": "Time since it began.",
    "aside": "Allocations of silent writers, which the watermark has passed; nobody else gets their bytes.",
    "at": "Wall clock of this machine, corrected by the agent's clock offset.",
    "bytes": "KV bytes moved so far.",
    "cause": "What is wrong, in words.",
    "chunk": "Number of the chunk in the room's chunk grid.",
    "clock_error": "Bound of the error of the clock offset.",
    "clock_offset": "Clock of the agent minus the clock it is compared with.",
    "code": "Health or failure code: kvctl health explain CODE.",
    "default": "Value where nothing is set.",
    "differences": "Factors in which the two are incompatible.",
    "endpoint": "Address at which it is reached.",
    "errors": "Errors between the two since the agent started.",
    "evidence": "Numbers that the finding rests on.",
    "exposed": "Time parts were on their way after the forward was done, not hidden behind compute.",
    "help": "What it is.",
    "hidden": "Time parts were on their way while the forward still ran.",
    "incarnation": "Random id of this start of the agent.",
    "lane": "Transport lane between the two agents.",
    "lane_direct": "How the peer's GPU memory is mapped here: nvlink, pcie, same device, fabric.",
    "landed": "Cells that have arrived at the decode rank.",
    "latency": "Decode rank: open to success. Prefill rank: first part ready to sent.",
    "layers": "Layers of the model, both ends included.",
    "muted": "For how long the finding is still muted.",
    "name": "Name of the metric.",
    "nonce": "Number that tells a reused room number from its predecessor.",
    "origin": "Where the value comes from: default, file, environment or argument.",
    "path": "How parts moved: bulk, slice, staged or direct.",
    "paths": "Parts moved, by path.",
    "peer": "The other agent.",
    "planned": "Cells (writer, chunk, layer) that the plan has for this rank.",
    "protocol": "Lowest and highest admin protocol that is understood.",
    "remedy": "What to do about it.",
    "role": "prefill or decode.",
    "room": "Number of the room (bootstrap_room).",
    "rooms": "Active rooms.",
    "rtt": "Round trip time.",
    "scattered": "Cells that are in their pages.",
    "sent": "Cells whose write the transfer engine reported complete.",
    "severity": "How bad it is.",
    "since": "How long it has been so.",
    "state": "State.",
    "state_age": "Time in this state; unknown once the room is finished.",
    "subject": "What it is about.",
    "text": "In words.",
    "tokens": "Tokens of the prompt whose KV is transferred.",
    "uptime": "Time since the agent started.",
    "value": "Value.",
    "version": "Version of the software.",
    "writer": "Number of the prefill rank that writes the part.",
    "pid": "Process id.",
    "runtime": "Whether it may be set while the agent runs: kvctl config set.",
    "unit": "Unit of the value.",
    "key": "Name of the key.",
}

_ROOMS = {
    "age": "Time since the room was opened; ends when the room is finished.",
    "failure": "First cause of the failure: rank, code and text.",
    "finished_at": "When the room finished.",
    "forward_done_at": "Prefill rank: when the forward of the prompt was done.",
    "missing": "Agents whose next message ends this state.",
    "opened_at": "When the room was opened.",
    "owed": "Decode rank: cells that have not landed, by writer.",
    "pages": "Pages of the room on this rank.",
    "parked": "Parts that wait for room in a ring.",
    "parts": "Parts moved so far.",
    "peers": "Agents that take part in the room with this rank.",
    "progress": "Cells done of cells planned: scattered on a decode rank, sent on a prefill rank.",
    "state": "Bootstrapping, WaitingForInput, Transferring, Success or Failed.",
}

_OF_VIEW: Mapping[str, Mapping[str, str]] = {
    "agents": {
        "capabilities": "Features that the agent was built and configured with.",
        "level": "What you may do there: read, operate or admin.",
        "state": "ok, stale (a socket without a process), or why there is no answer.",
    },
    "bootstrap": {
        "asked_by": "Agents that asked this registry.",
        "decode_connected": "Decode ranks connected to every registered prefill rank.",
        "decode_ranks": "Decode ranks that asked this registry.",
        "expected": "Prefill ranks of the instance.",
        "missing": "Coordinates of prefill ranks that have not registered.",
        "names": "Prefill ranks that have registered.",
        "registered": "Number of prefill ranks that have registered.",
        "registry": "Address of the bootstrap registry.",
        "sizes": "Ranks along each axis: dp, pp, cp, tp.",
        "state": "complete, waiting, refused or silent.",
        "text": "What is missing or refused, as the registry says it.",
        "unanswered": "Registered prefill ranks that do not answer kvctl.",
    },
    "bootstrap.ranks": {
        "connected": "Decode ranks connected to this prefill rank.",
        "rank": "Coordinates in the instance.",
        "state": "registered or missing.",
    },
    "check": {
        "check": "Area that is checked.",
        "muted": "Muted findings, which do not count.",
        "problems": "Findings, thresholds exceeded and agents that do not answer.",
        "state": "ok, warning, critical or unknown.",
        "values": "Measures of the area, in seconds, bytes, ratios and counts.",
    },
    "config.key": {
        "choices": "Values allowed.",
        "environment": "Environment variable that sets it.",
        "maximum": "Largest value allowed.",
        "minimum": "Smallest value allowed.",
        "sglang": "SGLang's name for it.",
        "type": "Type of the value.",
    },
    "contexts": {
        "context": "Name of the context.",
        "endpoint": "Agents of the context.",
        "in_use": "Whether it is the context in use.",
        "key": "Client key.",
        "labels": "Labels that agents must have.",
        "server_key": "Public key of the fleet.",
        "timeout": "How long an agent may take to answer.",
    },
    "doctor": {
        "next": "Command to type next.",
        "rank": "Place in the ranking, the worst first; none for facts of the host that are well.",
    },
    "done": {
        "result": "What became of it.",
        "subject": "Room, allocation, key or agent that was acted on.",
        "text": "What the agent did, in words.",
    },
    "events": {
        "kind": "What the event is about.",
        "sequence": "Number in the agent's flight recorder.",
        "severity": "debug, info, warning or error.",
        "text": "What happened.",
    },
    "failed": {
        "after": "Time from when the room was opened to its failure.",
        "agents": "Agents that know the room.",
        "ago": "Time since the failure.",
        "bytes": "KV bytes moved before it failed.",
        "failed_at": "When the room failed.",
        "rank": "Agent on which the room failed first.",
        "text": "First cause of the failure.",
        "waits_for": "Agents that the room still waits for, so that its memory can be reused.",
    },
    "health": {"severity": "info, warning or critical."},
    "health_codes": {
        "alert": "The same as a Prometheus expression, where metrics can say it.",
        "area": "Area of kvctl check that it belongs to.",
        "means": "What it means.",
        "sees": "What an operator sees.",
        "severity": "Worst severity that it is raised with.",
    },
    "health_mutes": {
        "left": "Time until the mute ends.",
        "made_at": "When it was muted.",
        "reason": "Why it was muted.",
        "target": "Code, or code and subject, that is muted.",
        "until_worse": "What was found when it was muted; anything worse ends the mute.",
    },
    "history": _ROOMS,
    "layers": {
        "bytes": "Bytes of these parts.",
        "exposed": "Mean per part: time on its way after the forward was done.",
        "hidden": "Mean per part: time on its way while the forward still ran.",
        "parts": "Parts measured.",
        "share": "Share of the time on the way that was hidden behind compute.",
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
    "metrics_schema": {"kind": "counter, gauge or histogram.", "labels": "Names of its labels."},
    "peers": {
        "control_queue": "Control messages to the peer that have not been sent yet.",
        "lane_descriptor": "Measured time per scattered descriptor of 512 bytes.",
        "lane_gb_per_s": "Measured rate of one large write, in GB/s.",
        "lane_kind": "What carries the lane between GPUs, inferred from its rate.",
        "lane_measured_age": "Time since the lane was measured.",
        "lane_why_not": "Why the peer's GPU memory is not mapped here.",
        "last_error": "Last error with this peer.",
        "last_heard": "Time since the peer was last heard.",
        "role": "Role of the peer.",
        "same_host": "Whether the peer's process can be seen from here, so that its death can be proven.",
        "process": "The peer's process id and host.",
        "former": "Earlier processes of this name that may still write here: nothing has proven that they have ended.",
        "state": "connecting, ready, suspect, lost or refused.",
        "watermark_seen": "Prefill rank: round, tail and sequence of the watermark last received.",
        "watermark_sent": "Decode rank: round, tail and sequence of the watermark last sent.",
    },
    "peers.diff": {
        "a": "Value of the first agent.",
        "b": "Value of the second agent.",
        "factor": "What is compared.",
        "kind": "Where the factor comes from.",
        "verdict": "incompatible, differs or same.",
    },
    "peers.matrix": {
        "decode": "Name of the decode agent.",
        "decode_sees": "State of the prefill agent, as the decode agent sees it.",
        "prefill": "Name of the prefill agent.",
        "prefill_sees": "State of the decode agent, as the prefill agent sees it.",
        "state": "State of the pair, the worse of both sides.",
    },
    "probe": {
        "bytes": "Bytes of each descriptor.",
        "descriptor": "Time that each further descriptor adds.",
        "descriptors": "Descriptors in one write.",
        "gb_per_s": "Rate, in GB/s.",
        "write": "Time of one write.",
    },
    "room": {
        "at": "Wall clock of this machine.",
        "detail": "What the rank noted.",
        "relative": "Milliseconds since the room was first opened.",
        "stage": "Stage of a part, or event of the room.",
    },
    "rooms": _ROOMS,
    "room-ranks": {"state": _ROOMS["state"]},
    "slow": _ROOMS,
    "stacks": {
        "at": "Innermost frame.",
        "daemon": "Whether it is a daemon thread.",
        "depth": "Number of frames.",
        "frames": "All frames, the outermost first.",
        "ident": "Identifier of the thread.",
        "thread": "Name of the thread.",
    },
    "staging": {
        "ahead": "Bytes granted beyond the ring's size: their writers wait for a later round.",
        "buffers": "Size of the prefill rank's staging buffers.",
        "copies_waiting": "Landed parts whose copy into the pages has not ended.",
        "copying": "Time since the oldest copy that has not ended began.",
        "enabled": "Whether staging is configured.",
        "fallbacks": "Parts that did not fit and took another path.",
        "gated": "Parts that wait for a grant or for the watermark.",
        "granted": "Allocations granted since the start.",
        "head": "Offset at which the next allocation begins.",
        "high_water": "Most bytes of the ring ever in use.",
        "live": "Live allocations.",
        "oldest": "Age of the oldest allocation, which holds the watermark.",
        "oldest_room": "Room of the oldest allocation.",
        "oldest_state": "State of the oldest allocation.",
        "piece": "Size of one piece of the buffers.",
        "pieces": "Pieces of the buffers.",
        "pieces_high_water": "Most pieces ever in use.",
        "pieces_used": "Pieces in use.",
        "refused": "Grants refused since the start.",
        "revoked": "Grants revoked since the start.",
        "ring": "Size of the decode rank's ring.",
        "round": "Times the head has gone round the ring.",
        "tail": "Offset of the watermark.",
        "tail_age": "Time since the watermark moved.",
        "tail_round": "Round of the watermark.",
        "used": "Share of the ring in use.",
    },
    "staging_gated": {
        "age": "Time since the part was ready.",
        "asked_age": "Time since its grant was first requested.",
        "bytes": "Size of the part.",
        "requests": "Times its grant was requested, resends included.",
        "waiting_for": "A grant, or the round and tail that the watermark has to pass.",
    },
    "staging_map": {
        "age": "Time since it was granted.",
        "aside": "Whether its writer is silent, so that the watermark has passed it.",
        "offset": "Where in the ring it begins.",
        "posted": "Whether its writer is writing it, and cannot give it back.",
        "room_state": "State of its room on the decode rank.",
        "round": "Round of the ring it belongs to.",
        "serial": "Number of the allocation, never reused.",
        "size": "Size of the allocation.",
        "state": "granted, landed, revoking or quarantined.",
        "writer": "Name of the agent that writes it.",
    },
    "status": {
        "active": "Active rooms.",
        "backend": "Backend of the transport engine.",
        "decisions": "Prefill rank: forwards, by why they were pipelined or not.",
        "device": "Where the KV pool is.",
        "done": "Rooms finished with success since the start.",
        "draining": "Whether it accepts no new rooms.",
        "failed": "Rooms failed since the start.",
        "gb_per_s": "Rate while rooms are open, in GB/s.",
        "health": "Health codes of findings that name this agent; ok for none.",
        "lanes": "Transport lanes in use.",
        "moved": "KV bytes sent (prefill) or landed (decode) since the start.",
        "p50": "Median latency of rooms.",
        "p90": "90th percentile of the latency of rooms.",
        "p99": "99th percentile of the latency of rooms.",
        "peers": "Peers, by state.",
        "pipeline": "Prefill rank: mode of layer pipelining.",
        "rank": "Coordinates on the axes that the instance splits.",
        "ring": "Decode rank: share of the ring in use.",
        "ring_high_water": "Decode rank: most bytes of the ring ever in use.",
        "ring_size": "Decode rank: size of the ring.",
        "rooms": "Active rooms, by state.",
        "rooms_per_s": "Rooms finished per second.",
        "transport": "Transport engine.",
        "waiting_for": "What the agent waits for before it accepts rooms.",
    },
    "status_watch": {
        "agents": "Agents that answered.",
        "bootstrapping": "Rooms in Bootstrapping.",
        "done_per_s": "Rooms finished with success per second since the line before.",
        "failed_per_s": "Rooms failed per second since the line before.",
        "gb_per_s": "Rate since the line before, in GB/s.",
        "health": "Warnings and critical findings.",
        "p50": "Median over the ranks' median latencies.",
        "p99": "Largest of the ranks' 99th percentiles of latency.",
        "ring": "Share of all rings in use.",
        "transferring": "Rooms in Transferring.",
        "waiting": "Rooms in WaitingForInput.",
    },
    "version": {
        "component": "This tool, or the agent.",
        "python": "Version of Python.",
    },
}


def tables(view: View) -> list[tuple[str, View]]:
    """Every table that a command of this view prints: (when it is printed, its view)."""
    from kvctl.render import bootstrap, rooms, staging, status

    also = {
        "bootstrap": ("Ranks of each instance", bootstrap.RANKS),
        "room": ("Ranks of the room", rooms.RANKS),
        "staging": ("Gated parts", staging.GATED),
        "status": ("With -w", status.MOMENTS),
    }
    return [("", view), *([also[view.name]] if view.name in also else [])]


def entries(view: View) -> list[tuple[str, str, str, str]]:
    """(header, name, unit, meaning) of each column."""
    return [(column.title, column.machine, unit(column), meaning(view, column) or "") for column in view.columns]


def meaning(view: View, column: Column) -> str | None:
    """What a column of the view says, in a sentence; None for a column that is in no glossary."""
    return _OF_VIEW.get(view.name, {}).get(column.name) or _COMMON.get(column.name)


def unit(column: Column) -> str:
    """Unit of the whole numbers in JSON, YAML, CSV and TSV; "" for columns without one."""
    return _UNITS.get(column.kind.value.suffix, "")


def unknown_names(views: Sequence[View]) -> set[str]:
    """Entries that no column of these views has: they describe what is no longer printed."""
    columns = {view.name: set(view.names()) for view in views}
    everywhere = set[str]().union(*columns.values())
    of_view = {
        f"{view}: {name}" for view, names in _OF_VIEW.items() for name in names if name not in columns.get(view, set())
    }
    return of_view | (_COMMON.keys() - everywhere) | (_STAGES.keys() ^ set(STAGES))
