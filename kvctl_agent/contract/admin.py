"""Wire constants of the admin socket, and the paths of sockets.

A request (from a DEALER socket) has the frames `[MAGIC, request id, JSON {"cmd", "args"}]`, a reply
`[MAGIC, request id, JSON]`, where the JSON object is one of

- `{"ok": true, "data": ..., "generated_at_ns": wall clock, "sequence": int}`
- `{"ok": false, "error": {"code", "message"}, "generated_at_ns": wall clock, "sequence": int}`

`sequence` grows by one with every reply of one incarnation of the agent, to any client, so of two replies the one with
the higher number is newer. A reply repeats the request id, or has an empty id if the request had no valid one. Replies
to a client that does not read them are dropped. A frame far larger than `MAX_REQUEST_BYTES` closes the connection.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from zlib import crc32

MAGIC = b"KVA1"
PROTOCOL_MIN = 1
PROTOCOL_MAX = 1
MAX_REQUEST_BYTES = 1 << 20
MAX_REQUEST_ID_BYTES = 64
MAX_REPLY_BYTES = 64 << 20
# sun_path holds 108 bytes including the NUL; libzmq's error for longer paths does not name the cause.
MAX_SOCKET_PATH_BYTES = 107
SOCKET_SUFFIX = ".sock"
LOCK_SUFFIX = ".lock"
ENDED_SUFFIX = ".ended"
"""Suffix of the region of a worker that has ended without closing it; its modification time is that of the end."""
SOCKET_DIR_VARIABLE = "KVCTL_SOCKET_DIR"
OBSERVER_SOCKET = "observer.ctl"
"""Name of the Unix socket, in the directory of the admin sockets, at which agents register with the observer process;
it refuses connections if that process was killed."""
RELAY_SOCKET = "observer.batch"
"""Name of the Unix socket, in the same directory, at which the observer process answers for all of its agents.

A request has the frames `[MAGIC, number, bodies, names]`: bodies as those of requests to one agent, and agents' names,
each joined by NUL bytes. Each body is for each of the agents; an empty name stands for the observer, which answers with
the names of all. Replies are joined, too: `[MAGIC, b"", JSON]`, with an array of pairs of "number.agent.body", where
agent and body are indexes, and the reply."""


class ErrorCode(StrEnum):
    """Values of `error.code` in the reply to a refused request."""

    BAD_REQUEST = "bad-request"
    BAD_ARGUMENT = "bad-argument"
    UNKNOWN_COMMAND = "unknown-command"
    UNKNOWN_ROOM = "unknown-room"
    UNKNOWN_AGENT = "unknown-agent"
    NOT_PERMITTED = "not-permitted"
    REFUSED = "refused"  # the action is unsafe or not applicable now; the message gives the reason
    TIMEOUT = "timeout"
    TOO_LARGE = "too-large"
    PROTOCOL = "protocol"
    INTERNAL = "internal"


def socket_dir() -> Path:
    """Returns the directory of the admin sockets.

    The first of these that applies: `KVCTL_SOCKET_DIR` if set, `$XDG_RUNTIME_DIR/kvctl` if that variable is set,
    `/run/kvctl` if it exists and is writable, `/tmp/kvctl-<uid>`.
    """
    if explicit := os.environ.get(SOCKET_DIR_VARIABLE):
        return Path(explicit)
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "kvctl"
    system = Path("/run/kvctl")
    if system.is_dir() and os.access(system, os.W_OK | os.X_OK):
        return system
    return Path(f"/tmp/kvctl-{os.getuid()}")


def region_directory(sockets: Path) -> Path:
    """Returns the directory of the regions of agents whose admin sockets are in `sockets`.

    It is in /dev/shm, if that is there and can be written, as on a disk the kernel would write the pages back.
    """
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK | os.X_OK):
        number = crc32(os.fsencode(sockets.resolve()))  # of all its spellings
        return memory / f"kvctl-{os.geteuid()}-{number:08x}"
    return sockets


def lock_path(socket: Path) -> Path:
    """Returns the path of the lock file of an admin socket; the agent that serves the socket holds the lock."""
    return socket.with_name(socket.name.removesuffix(SOCKET_SUFFIX) + LOCK_SUFFIX)


def socket_path(name: str, directory: Path | None = None) -> Path:
    """Returns the path of the admin socket of agent `name`.

    Raises:
        ValueError: the name is empty or not a file name, or the path exceeds 107 bytes.
    """
    if not name or name in {".", ".."} or "/" in name or "\0" in name:
        raise ValueError(f"agent name {name!r} cannot be a file name: it must be non-empty and without '/' or NUL")
    path = (directory or socket_dir()) / f"{name}{SOCKET_SUFFIX}"
    size = len(os.fsencode(path))
    if size > MAX_SOCKET_PATH_BYTES:
        raise ValueError(
            f"admin socket path {path} has {size} bytes, a Unix socket takes at most {MAX_SOCKET_PATH_BYTES}: "
            "use a shorter agent name or set KVCTL_SOCKET_DIR to a shorter directory"
        )
    return path
