"""Which agents each source named last: a small file per source in the user's cache directory, for a day.

From it, agents are asked while their source does not answer. The file is a cache: if it cannot be read or written,
nothing is remembered.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import orjson

from kvctl.client.atomic_file import atomic_file
from kvctl.client.endpoints import Endpoint, endpoint_of
from kvctl.errors import CliError

KEPT_NS = 24 * 3600 * 1_000_000_000
MAX_FILES = 64
_MAX_BYTES = 8 << 20


def remember(url: str, endpoints: Sequence[Endpoint], now_ns: int) -> None:
    """Stores what a source has named at this wall time."""
    path = path_of(url)
    rows = [(each.address, each.name, each.host_name) for each in endpoints]
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with atomic_file(path) as file:
            file.write(orjson.dumps({"named_ns": now_ns, "agents": rows}))
        _remove_old(path.parent)


def recall(url: str, now_ns: int) -> tuple[tuple[Endpoint, ...], int]:
    """Returns the agents that a source has named last within a day, and when; none and 0 if that is unknown."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, CliError):
        with path_of(url).open("rb") as file:
            content = orjson.loads(file.read(_MAX_BYTES))
        named_ns = int(content["named_ns"])
        found = [
            replace(endpoint_of(address), name=str(name), host_name=str(host))
            for address, name, host in content["agents"]
        ]
        if 0 <= now_ns - named_ns <= KEPT_NS:
            return tuple(found), named_ns
    return (), 0


def path_of(url: str) -> Path:
    """Returns the path of the file about a source; its name is a hash, because a URL may hold a secret."""
    home = os.environ.get("XDG_CACHE_HOME")
    with contextlib.suppress(RuntimeError):  # no home directory
        home = home or str(Path("~/.cache").expanduser())
    checksum = hashlib.blake2s(url.encode(errors="surrogateescape"), digest_size=16).hexdigest()
    # Without a home directory there is none; in /tmp, another user could have made it.
    return Path(home or os.devnull) / "kvctl" / "agents" / f"{checksum}.json"


def _remove_old(folder: Path) -> None:
    """Removes the files of sources that were last used more than a day ago, and the oldest if there are too many."""
    ages = sorted(((time.time() - path.stat().st_mtime, path) for path in folder.iterdir()), reverse=True)
    for index, (age_s, path) in enumerate(ages):
        if age_s > KEPT_NS / 1e9 or len(ages) - index > MAX_FILES:
            path.unlink(missing_ok=True)
