"""Counts what an agent holds in memory: the size of every container reachable from it.

No container is listed by name, so a structure added later is counted as well. Only bounded histories, which fill up
with time, are named in `BOUNDS`, each with its bound.
"""

from __future__ import annotations

import gc
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from enum import Enum
from queue import SimpleQueue
from typing import Any

Sizes = dict[str, int]

_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_BUFFERS = (bytearray, SimpleQueue)
# Integers that count what is held; all others (serials, times, totals) are ignored.
_HELD = frozenset({"_used", "in_flight", "_in_flight", "_outbox_bytes", "_running", "parked", "quarantined_bytes"})

# Histories that are kept on purpose: path and largest size. Their contents are not counted.
BOUNDS = {
    r"telemetry\.rooms\._ended": 1024,
    r"telemetry\._interpreter\._noted": 64,  # what is not counted yet
    r"telemetry\.metrics\.(series|_.*)": 1024,  # label sets
    # Where the agent's process has the observer's fold.
    r"fold\.rooms\._(latest|slowest|failed\._by_code)": 256,  # history_rooms, failed_rooms
    r"fold\.recorder\._ring": 4096,  # recorder_events
    r"fold\.latencies\._(latest|ascending)": 1024,
    r"fold\.recent_ends\._slices": 31,  # of ten seconds
    r"fold\.rate\._spans": 4096,  # intervals of the last ten seconds
    r"fold\.rate\._rooms": 100_000,  # rooms of the last ten seconds
    r"fold\.stages\._groups": 1024,
    r"fold\.transfers\._by_peer\[\]\.rooms": 64 * 64,  # the latest 64 of each peer
    r"fold\.metrics\..*": 1024,  # label sets
    r"machine\.peers\[\]\.ended_incarnations": 64 * 64,  # of each peer
    r"transfers\._connections\[\]\.wire_times_ns": 32 * 64,  # of the latest parts to each peer
    r"machine\._context\.actions": 1024,  # of the last event
    r"transport\._sessions": 4096,  # Mooncake's engine keeps every port that it has written to
}
_BOUNDED = re.compile("|".join(f"({pattern})" for pattern in BOUNDS))


def census(root: object) -> Sizes:
    """Returns container sizes by path from `root`; elements of a container share a path, and their sizes are added."""
    sizes: Counter[str] = Counter()
    for path, thing in _walk(root):
        if isinstance(thing, SimpleQueue):
            sizes[path] += thing.qsize()
        elif isinstance(thing, (*_CONTAINERS, bytearray, int)):
            sizes[path] += thing if isinstance(thing, int) else len(thing)
    return dict(sizes)


def instances(*roots: object) -> Sizes:
    """Counts live objects by class of kvctl_agent, including objects held only by closures or frames.

    The contents of bounded histories that are reachable from `roots` are excluded.
    """
    history: set[int] = set()
    for root in roots:
        for path, thing in _walk(root):
            if _BOUNDED.fullmatch(path):
                history |= _below(thing)
    gc.collect()
    kinds = (type(thing) for thing in gc.get_objects() if id(thing) not in history)
    return dict(Counter(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if _ours(kind)))


def grown(before: Sizes, after: Sizes) -> list[str]:
    """Returns one line for each container that is larger than before, or above its bound if it is a history.

    Paths may begin with the name of their agent, as in "decode-0: ".
    """
    lines: list[str] = []
    for path, size in after.items():
        place = path.rpartition(": ")[2]
        bound = next((bound for pattern, bound in BOUNDS.items() if re.fullmatch(pattern, place)), None)
        if bound is None and size > before.get(path, 0):
            lines.append(f"{path}: {size} (was {before.get(path, 0)})")
        elif bound is not None and size > bound:
            lines.append(f"{path}: {size}, its bound is {bound}")
    return sorted(lines)


def _walk(root: object) -> Iterator[tuple[str, Any]]:
    """Yields every object reachable from `root` once, with its path; yields histories, but not their contents."""
    seen = {id(root)}
    queue: deque[tuple[str, Any]] = deque([("", root)])
    while queue:
        path, thing = queue.popleft()
        yield path, thing
        if isinstance(thing, _BUFFERS) or _BOUNDED.fullmatch(path):
            continue
        for name, inner in _inside(thing):
            below = f"{path}.{name}" if path and name != "[]" else f"{path}{name}"
            if name in _HELD and isinstance(inner, int):
                yield below, inner
            elif _followed(inner) and id(inner) not in seen:
                seen.add(id(inner))
                queue.append((below, inner))


def _below(thing: object) -> set[int]:
    """Returns the ids (as of `id()`) of a history and of everything reachable from it, keys included."""
    found = {id(thing)}
    queue = [thing]
    while queue:
        outer = queue.pop()
        keys = _copy(outer) if isinstance(outer, dict) else []
        for inner in [*keys, *(inner for _, inner in _inside(outer))]:
            if id(inner) not in found and _followed(inner):
                found.add(id(inner))
                queue.append(inner)
    return found


def _inside(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, _CONTAINERS):
        yield from (("[]", inner) for inner in _elements(thing))
        return
    for name in _slots(type(thing)):
        if hasattr(thing, name):
            yield name, getattr(thing, name)
    yield from _items(getattr(thing, "__dict__", {}))


def _elements(container: Any) -> Iterable[Any]:
    return [inner for _, inner in _items(container)] if isinstance(container, dict) else _copy(container)


def _items(mapping: Any) -> list[tuple[Any, Any]]:
    return _copy(mapping.items())


def _copy(things: Iterable[Any]) -> list[Any]:
    while True:
        try:
            return list(things)
        except RuntimeError:  # another thread changed the container during the copy
            continue


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else tuple(slots)
        fields = base.__dict__.get(
            "__struct_fields__", ()
        )  # fields of messages (msgspec); on the base class a descriptor
        for name in (*names, *(fields if isinstance(fields, tuple) else ())):
            yield f"_{base.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name


def _followed(thing: object) -> bool:
    if isinstance(thing, (*_CONTAINERS, *_BUFFERS)):
        return True
    return _ours(type(thing)) and not isinstance(thing, type | Enum)


def _ours(kind: type) -> bool:
    return str(kind.__module__).startswith("kvctl_agent.")
