"""Defines all kinds of faults and parses their specs, such as `control-loss=5%` or `pause=prefill-0@5s+3s`.

The options of `kvctl demo` take these specs. The level of a kind says what
injects it: the agent itself ("agent"), the driver of the rooms ("room") or the parent of the processes ("process").
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from kvctl.render.units import parse_duration
from kvctl_agent.contract.values import near

FaultLevel = Literal["agent", "room", "process"]
FaultUnit = Literal["share", "time", "jump", "messages", "rank"]

_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)%")
_RANK = re.compile(r"([A-Za-z0-9_.-]{1,64})@([^+]+)(?:\+(.+))?")
_SHOWN = 60
_HOUR_NS = 3_600_000_000_000

LOST = ("KV_PEER_LOST",)
STUCK = (
    "KV_ROOM_STUCK_BOOTSTRAP",
    "KV_ROOM_STUCK_WAITING",
    "KV_ROOM_STUCK_TRANSFER",
    "KV_ROOM_STUCK_SCATTER",
    "KV_ROOM_UNCLAIMED",
    "KV_HOLD_EXPIRED",
)


MESSAGES = (
    *("hello", "hello-ack", "hello-wanted", "heartbeat"),
    *("room-open", "room-kept", "room-accepted", "room-refused"),
    *("staging-request", "staging-grants", "staging-refused", "staging-revoke", "staging-revoked", "too-late"),
    *("watermark", "part-ready", "part-ack"),
    *("room-done", "readers-done", "room-failed", "ack", "room-abort", "room-drained", "room-renew", "bye"),
)
"""Names on the wire of the control messages that `message-loss` can drop."""


ENDED = (*LOST, *STUCK, "KV_TRANSPORT", "KV_ROOM_UNKNOWN")
"""Failure codes of rooms whose rank ends or stops."""


@dataclass(frozen=True, slots=True)
class FaultKind:
    """One kind of fault.

    Attributes:
        unit: form of the value in a spec: a "share" (5%), a "time" (20ms), a "jump" (-1h), "messages"
            (staging-grants+watermark), or a "rank" with start and duration (decode-1@5s+3s).
        explains: failure codes of rooms that the fault can cause; any other failure is a bug.
    """

    name: str
    unit: FaultUnit
    help: str
    explains: tuple[str, ...] = ()

    @property
    def level(self) -> FaultLevel:
        """What injects the fault; see the module."""
        return "process" if self.unit == "rank" else "room" if self.name == "abort" else "agent"

    @property
    def example(self) -> str:
        """A valid spec of this kind, for help and error messages."""
        return f"{self.name}={_EXAMPLES.get(self.name) or _EXAMPLES[self.unit]}"


# In nanoseconds; of the value for units "time" and "jump", of the duration for unit "rank".
_BOUNDS = {
    "time": (1_000, _HOUR_NS),
    "jump": (-87_600 * _HOUR_NS, 87_600 * _HOUR_NS),
    "rank": (1_000_000, 24 * _HOUR_NS),
}
_EXAMPLES = {
    "share": "5%",
    "time": "20ms",
    "jump": "-1h",
    "messages": "watermark",
    "kill": "decode-1@5s+2s",
    "pause": "prefill-0@5s+3s",
    "replace": "prefill-1@4s+22s",
}

FAULTS: tuple[FaultKind, ...] = (
    FaultKind("control-loss", "share", "Control frames lost, in and out.", LOST),
    FaultKind("control-delay", "time", "Every control frame is delayed by this time, in and out.", LOST),
    FaultKind("control-dup", "share", "Control frames delivered twice, the second one slightly later."),
    FaultKind("control-reorder", "share", "Control frames overtaken by later ones."),
    FaultKind("control-truncate", "share", "Control frames truncated at a random byte.", LOST),
    FaultKind("control-garbage", "share", "Control frames replaced by random bytes.", LOST),
    FaultKind(
        "message-loss",
        "messages",
        "All control messages of these types lost, in and out; watermark: also those inside other messages.",
        (*LOST, *STUCK),
    ),
    FaultKind("notify-loss", "share", "Arrival tags lost at the decode rank; the bytes have landed."),
    FaultKind("notify-dup", "share", "Arrival tags delivered twice."),
    FaultKind("write-error", "share", "Writes refused by the engine; none of their bytes land.", ("KV_TRANSPORT",)),
    FaultKind("write-doubt", "share", "Writes reported as failed whose bytes land slightly later.", ("KV_TRANSPORT",)),
    FaultKind("slow-reader", "time", "A decode rank polls for arrivals only at this interval."),
    FaultKind(
        "slow-scatter", "time", "A staged part is copied from the ring to its pages this long after it landed.", STUCK
    ),
    FaultKind("slow-writer", "time", "A write is reported complete this long after its post."),
    FaultKind("slow-lane", "time", "Every write is posted this much later, so the bytes are late as well."),
    FaultKind(
        "corrupt-write",
        "share",
        "Writes with one wrong byte on the wire; detected by the decode rank if checksum is on.",
        ("KV_CHECKSUM_MISMATCH",),
    ),
    FaultKind(
        "clock-jump",
        "jump",
        "The wall clock is wrong by this much; an agent started with it has a wrong incarnation as well.",
    ),
    FaultKind(
        "preempt",
        "share",
        "Rooms of kvctl demo whose engine takes their pages back at a random time and goes on in other pages.",
        ("RECALL_LATE",),
    ),
    FaultKind("abort", "share", "Rooms aborted by one of their ranks at a random time.", ("ABORTED",)),
    FaultKind(
        "kill", "rank", "SIGKILL of a rank at this time after the start; +TIME: restarted this much later.", ENDED
    ),
    FaultKind("pause", "rank", "SIGSTOP of a rank at this time after the start, SIGCONT this much later.", ENDED),
    FaultKind(
        "replace",
        "rank",
        "As pause, for a prefill rank without the registry; a new process takes its place before it continues.",
        ENDED,
    ),
)

FAULTS_BY_NAME: dict[str, FaultKind] = {kind.name: kind for kind in FAULTS}


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault parsed from a spec; which fields are set depends on the unit of its kind.

    Attributes:
        share: probability from 0 to 1, for unit "share".
        ns: value in nanoseconds, for units "time" and "jump".
        at_ns: start after the start of the run, for unit "rank".
        for_ns: duration, for unit "rank"; None: until the end of the run.
    """

    kind: FaultKind
    text: str
    share: float = 0.0
    ns: int = 0
    messages: tuple[str, ...] = ()
    rank: str = ""
    at_ns: int = 0
    for_ns: int | None = None

    @property
    def name(self) -> str:
        """Name of the fault's kind."""
        return self.kind.name


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Parses specs separated by commas.

    Raises:
        ValueError: a spec is invalid, or a kind whose unit is not "rank" occurs twice.
    """
    faults = tuple(parse_fault(word.strip()) for word in text.split(","))
    names = [fault.name for fault in faults if fault.kind.unit != "rank"]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{text[:_SHOWN]!r}: {name} is given twice")
    return faults


def parse_fault(text: str) -> Fault:
    """Parses one spec.

    Raises:
        ValueError: the kind is unknown or the value is invalid; the message names what is allowed.
    """
    name, separator, value = text.partition("=")
    kind = FAULTS_BY_NAME.get(name)
    if kind is None:
        hint = near(name[:_SHOWN], FAULTS_BY_NAME) or f": there are {', '.join(FAULTS_BY_NAME)}"
        raise ValueError(f"{text[:_SHOWN]!r} is not a fault{hint}")
    if not separator:
        raise ValueError(f"{text[:_SHOWN]!r}: {name} needs a value, such as {kind.example}")
    if kind.unit == "share":
        return Fault(kind, text, share=_share(kind, text, value))
    if kind.unit == "messages":
        return Fault(kind, text, messages=_messages(kind, text, value))
    if kind.unit == "rank":
        return _of_rank(kind, text, value)
    return Fault(kind, text, ns=_time(kind, text, value, *_BOUNDS[kind.unit]))


def _share(kind: FaultKind, text: str, value: str) -> float:
    match = _SHARE.fullmatch(value)
    share = float(match[1]) / 100 if match else 0.0
    if not 0 < share <= 1:
        raise ValueError(f"{text[:_SHOWN]!r}: {kind.name} takes more than 0% and at most 100%, such as {kind.example}")
    return share


def _messages(kind: FaultKind, text: str, value: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(value.split("+")))
    for name in names:
        if name not in MESSAGES:
            hint = near(name[:_SHOWN], MESSAGES) or f": there are {', '.join(MESSAGES)}"
            raise ValueError(f"{text[:_SHOWN]!r}: {kind.name} takes message types, {name[:_SHOWN]!r} is not one{hint}")
    return names


def _of_rank(kind: FaultKind, text: str, value: str) -> Fault:
    match = _RANK.fullmatch(value)
    if match is None:
        raise ValueError(f"{text[:_SHOWN]!r}: {kind.name} takes RANK@TIME+TIME, such as {kind.example}")
    rank, at, lasting = match.groups()
    if lasting is None and kind.name in ("pause", "replace"):
        raise ValueError(f"{text[:_SHOWN]!r}: give a duration, such as {kind.example}")
    low, high = _BOUNDS["rank"]
    at_ns = _time(kind, text, at, 0, high)
    for_ns = None if lasting is None else _time(kind, text, lasting, low, high)
    return Fault(kind, text, rank=rank, at_ns=at_ns, for_ns=for_ns)


def _time(kind: FaultKind, text: str, value: str, low: int, high: int) -> int:
    try:
        ns = parse_duration(value.removeprefix("-")) * (-1 if value.startswith("-") else 1)
    except ValueError:
        shown = f"{text[:_SHOWN]!r}: {value[:_SHOWN]!r}"
        raise ValueError(f"{shown} is not a time with a unit, such as {kind.example}") from None
    if not low <= ns <= high:
        raise ValueError(f"{text[:_SHOWN]!r}: {value[:_SHOWN]} is not from {low / 1e9:g} to {high / 1e9:g} s")
    return ns
