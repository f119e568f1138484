"""All C and C++ code of the agent, which needs no GIL: copies in host memory, writes and tags of NIXL, and waits.

`row_copies` copies between a pool's pages and staging; `nixl_requests` posts writes and waits for tags; `turns` waits,
and borrows the GIL from the main thread afterwards. All include `common.h`. `pyproject.toml` declares how they are
built; there is no second implementation in Python.
"""

from __future__ import annotations

try:
    # Not `from kvctl_agent.native import`, whose error is of a circular import and names this package.
    import kvctl_agent.native.nixl_requests as nixl_requests
    import kvctl_agent.native.row_copies as row_copies
    import kvctl_agent.native.turns as turns
except ImportError as error:
    raise ImportError(
        f"kvctl_agent's native code cannot be loaded ({error}): in a checkout, build it: make setup, or pip install "
        "-e . with a C++ compiler and Python's headers (Debian: apt-get install g++ python3-dev)",
        name=error.name,
    ) from error

Turns = turns.Turns

__all__ = ["Turns", "nixl_requests", "row_copies"]
