"""Which part of a fleet each code is about: what `kvctl check AREA` looks at."""

from __future__ import annotations

AREAS: dict[str, str] = {
    "ready": "agents answer, and all the ranks that they wait for are there",
    "peers": "agents hear each other, fit together and believe the same",
    "staging": "rings and grants: nothing pins, gates or overflows them",
    "rooms": "rooms go on, and what arrives is right",
    "transport": "lanes are as fast as they should be, and the engines have what they need",
}

_PREFIXES: tuple[tuple[str, str], ...] = (
    ("KV_ROOM_STUCK_BOOTSTRAP", "ready"),
    ("KV_NOT_READY", "ready"),
    ("KV_DRAINING", "ready"),
    ("KV_PORT_CLASH", "ready"),
    ("KV_PEER", "peers"),
    ("KV_COMPAT", "peers"),
    ("KV_SUBSCRIBER", "peers"),
    ("KV_CLOCK", "peers"),
    ("KV_RING", "staging"),
    ("KV_GRANT", "staging"),
    ("KV_CHUNK", "staging"),
    ("KV_QUARANTINE", "staging"),
    ("KV_LANE", "transport"),
    ("KV_DESCRIPTOR", "transport"),
    ("KV_DEVICE", "transport"),
    ("KV_REGISTER", "transport"),
    ("KV_FDS", "transport"),
    ("KV_PORTS", "transport"),
    ("KV_TRANSPORT", "transport"),
    ("KV_READY_GAP", "transport"),
    ("KV_METRIC", "transport"),
)


def area(code: str) -> str:
    """Of a code: rooms, unless it is about something that rooms only use."""
    return next((area for prefix, area in _PREFIXES if code.startswith(prefix)), "rooms")
