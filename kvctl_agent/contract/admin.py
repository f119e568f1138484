"""The admin socket's wire constants and where sockets live.

Request (DEALER): frames `[MAGIC, request id, JSON {"cmd", "args"}]`; reply: `[MAGIC, request id, JSON]` with one of

- `{"ok": true, "data": ..., "generated_at_ns": wall clock, "sequence": int}`
- `{"ok": false, "error": {"code", "message"}, "generated_at_ns": wall clock, "sequence": int}`

`sequence` grows by one with every reply of one life of the agent, whoever asked: of two snapshots the higher one is
the newer. The request id comes back as it was sent, or empty where the request had none that could be read. A
client that does not read its replies loses them. A frame far above `MAX_REQUEST_BYTES` closes the connection.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path

MAGIC = b"KVA1"
PROTOCOL_MIN = 1
PROTOCOL_MAX = 1
MAX_REQUEST_BYTES = 1 << 20
MAX_REQUEST_ID_BYTES = 64
MAX_REPLY_BYTES = 64 << 20
# sun_path holds 108 bytes with its NUL; libzmq refuses longer paths with a text nobody understands.
MAX_SOCKET_PATH_BYTES = 107
SOCKET_SUFFIX = ".sock"
LOCK_SUFFIX = ".lock"
SOCKET_DIR_VARIABLE = "KVCTL_SOCKET_DIR"


class ErrorCode(StrEnum):
    """`error.code` of a refused request."""

    BAD_REQUEST = "bad-request"
    BAD_ARGUMENT = "bad-argument"
    UNKNOWN_COMMAND = "unknown-command"
    UNKNOWN_ROOM = "unknown-room"
    NOT_PERMITTED = "not-permitted"
    REFUSED = "refused"  # it would not be safe, or makes no sense here and now: the message says why
    TIMEOUT = "timeout"
    TOO_LARGE = "too-large"
    PROTOCOL = "protocol"
    INTERNAL = "internal"


def socket_dir() -> Path:
    """Where agents put and the operator's tool looks for admin sockets.

    `KVCTL_SOCKET_DIR` if set; else `$XDG_RUNTIME_DIR/kvctl`; else `/run/kvctl` where it exists and is ours to
    write; else `/tmp/kvctl-<uid>`.
    """
    if explicit := os.environ.get(SOCKET_DIR_VARIABLE):
        return Path(explicit)
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "kvctl"
    system = Path("/run/kvctl")
    if system.is_dir() and os.access(system, os.W_OK | os.X_OK):
        return system
    return Path(f"/tmp/kvctl-{os.getuid()}")


def lock_path(socket: Path) -> Path:
    """The lock file beside an admin socket: held by the agent that serves it, whose pid it contains."""
    return socket.with_name(socket.name.removesuffix(SOCKET_SUFFIX) + LOCK_SUFFIX)


def socket_path(name: str, directory: Path | None = None) -> Path:
    """Path of the admin socket of agent `name`.

    Raises:
        ValueError: the name is empty or would leave the directory, or the path exceeds 107 bytes.
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
