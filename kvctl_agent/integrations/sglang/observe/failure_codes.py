"""Failure codes of SGLang's rooms, from the texts of its reasons."""

from __future__ import annotations

import re

_CODES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (code, re.compile(pattern))
    for code, pattern in (
        ("KV_ROOM_STUCK_BOOTSTRAP", r"timed out .* in KVPoll\.Bootstrapping"),
        ("KV_ROOM_STUCK_WAITING", r"timed out .* in KVPoll\.WaitingForInput|Timed out waiting for prefill completion"),
        ("KV_PEER_LOST", r"Lost connection with|but now it is down|it might be dead|could be dead"),
        ("KV_PEER_LOST", r"Could not fetch|(_register_kv_args|send_metadata) to prefill .* failed"),
        ("ABORTED", r"^Aborted by"),
        (
            "KV_CHUNK_OVERSIZED",
            r"exceeds (the )?(ring buffer|staging ring)|cannot fit chunk|does not fit the staging ring",
        ),
        ("KV_ROOM_DUPLICATE", r"^Duplicate "),
        ("KV_COMPAT_MISMATCH", r"mismatch|requires peer|follow_bootstrap_room conflict"),
    )
)


def code_of(reason: str) -> str:
    """Returns the failure code of a reason that SGLang recorded; KV_TRANSPORT for those that its engine gave."""
    return next((code for code, pattern in _CODES if pattern.search(reason)), "KV_TRANSPORT")
