"""The engine's calls of an agent that are noted in the region, and the stack of the thread that called last.

Only calls by which an engine serves requests are noted, as they show whether its scheduler runs; those that any thread
makes, such as `Agent.waiting_for`, are not. Of several threads that call at once, the latest call is shown.
"""

from __future__ import annotations

import sys
import threading
from pathlib import PurePath
from types import FrameType
from typing import Final

import msgspec

from kvctl_agent.telemetry.region import Cell, Document, RegionWriter

CALLS: Final = (
    "send",
    "receive",
    "refuse",
    "decline",
    "renew",
    "layer_groups",
    "prefetch",
    "pages",
    "layers",
    "finish",
    "recall",
    "abort",
    "wait",
    "start",
    "drain",
    "unregister",
    "register",
    "close",
    "poll",
)
"""Names of the calls; `Cell.CALL` is an index of this tuple."""

SEND, RECEIVE, REFUSE, DECLINE, RENEW, LAYER_GROUPS, PREFETCH, PAGES, LAYERS = range(9)
FINISH, RECALL, ABORT, WAIT, START, DRAIN, UNREGISTER, REGISTER, CLOSE, POLL = range(9, 19)

_SILENT_NS = 1_000_000_000
_SAMPLE_NS = 1_000_000_000
_MOST_FRAMES = 8


class SilentEngine:
    """Samples the Python stack of the thread that called last, while an engine that has begun rooms makes no calls.

    The control loop calls `look` several times a second. A thread that holds the interpreter in a call of native code
    lets no other thread sample: then the last sample is older than the silence, or there is none.
    """

    def __init__(self, region: RegionWriter) -> None:
        self._region = region
        self._thread = 0  # whose task is in `Cell.CALL_TASK`
        self._sampled_ns = 0

    def look(self, now_ns: int, rooms: int) -> None:
        """Notes which task of the process the calling thread is; samples its stack if that is due.

        Args:
            rooms: rooms that the engine has begun and that have not ended. Those that only peers have opened need no
                call.
        """
        cells = self._region.cells
        thread = cells[Cell.CALL_THREAD]
        if thread != self._thread:
            self._thread = thread
            cells[Cell.CALL_TASK] = _task(thread)
        latest_ns = max(cells[Cell.CALL_NS], cells[Cell.CALL_ENDED_NS])
        due_ns = max(latest_ns + _SILENT_NS, self._sampled_ns + _SAMPLE_NS)
        if rooms and latest_ns and now_ns >= due_ns:
            self._sampled_ns = now_ns
            value = {"call_ns": cells[Cell.CALL_NS], "task": cells[Cell.CALL_TASK], "frames": _frames(thread)}
            self._region.publish(Document.STACK, msgspec.msgpack.encode(value), now_ns)


def _task(ident: int) -> int:
    return next((thread.native_id or 0 for thread in threading.enumerate() if thread.ident == ident), 0)


def _frames(ident: int) -> list[str]:
    """Returns the innermost frames of a thread's Python stack, innermost last; none if the thread has ended."""
    frame: FrameType | None = sys._current_frames().get(ident)
    frames: list[str] = []
    while frame is not None and len(frames) < _MOST_FRAMES:
        code = frame.f_code
        frames.append(f"{'/'.join(PurePath(code.co_filename).parts[-2:])}:{frame.f_lineno} {code.co_qualname}")
        frame = frame.f_back
    return frames[::-1]
