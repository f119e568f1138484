"""Where every Python thread of this process is right now: the first question about an agent that hangs."""

from __future__ import annotations

import sys
import threading
import traceback

from kvctl_agent.contract.snapshots import ThreadStack


def stacks() -> list[ThreadStack]:
    """One row per thread, innermost frame last, as in a traceback; threads that Python did not start included."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    rows: list[ThreadStack] = []
    for ident, frame in sys._current_frames().items():
        thread = threads.get(ident)
        rows.append(
            {
                "name": thread.name if thread else f"foreign-{ident}",
                "ident": ident,
                "daemon": thread.daemon if thread else True,
                "frames": [
                    f"{entry.filename}:{entry.lineno} {entry.name}" + (f": {entry.line}" if entry.line else "")
                    for entry in traceback.extract_stack(frame)
                ],
            }
        )
    return sorted(rows, key=lambda row: row["name"])
