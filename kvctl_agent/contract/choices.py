"""Names of the paths that a part may take, and of the modes of context parallelism."""

from __future__ import annotations

PATHS = BULK, SLICE, STAGED, DIRECT = "bulk", "slice", "staged", "direct"
CP_MODES = RANK0, ALL, ALL_CHUNK, ROOM_HASH = "rank0", "all", "all-chunk", "room-hash"
