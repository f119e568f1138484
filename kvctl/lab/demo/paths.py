"""Where a fleet lives on this machine: its ranks' names, its private directory, and the sockets that it may leave."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import tempfile
from collections.abc import Sequence

from kvctl.client.endpoints import discover
from kvctl.lab.ranks.bench_messages import PlannedRank
from kvctl_agent.contract.admin import LOCK_SUFFIX, socket_dir, socket_path

# Socket names of engines and agents below it must fit into 107 bytes.
_LONGEST_TMP_BYTES = 40


def rank_names(ranks: Sequence[PlannedRank]) -> list[str]:
    """`prefill-0`, `decode-3`; with several prefill instances `p1-prefill-0`."""
    several = any(rank["instance"] > 0 for rank in ranks)
    names = []
    for rank in ranks:
        instance = f"p{rank['instance']}-" if several and rank["role"] == "prefill" else ""
        names.append(f"{instance}{rank['role']}-{rank['unique']}")
    return names


def free_prefix(names: Sequence[str]) -> str:
    """ "" where nobody has these names; else one that sets this fleet apart."""
    found = discover()
    taken = {endpoint.name for endpoint in (*found.live, *found.stopped)}
    return "" if taken.isdisjoint(names) else f"b{secrets.randbelow(9000) + 1000}-"


def temporary() -> str:
    """Where the private directory is made."""
    configured = tempfile.gettempdir()
    return configured if len(os.fsencode(configured)) <= _LONGEST_TMP_BYTES else "/tmp"


def remove_admin_socket(name: str) -> None:
    """What a rank that was killed leaves; a name that somebody else holds by now stays."""
    lock = socket_dir() / f"{name}{LOCK_SUFFIX}"
    with contextlib.suppress(OSError):
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            socket_path(name).unlink(missing_ok=True)
            lock.unlink(missing_ok=True)
        finally:
            os.close(descriptor)
