"""`python -m kvctl`, for environments whose scripts are not on PATH."""

from __future__ import annotations

from kvctl.cli import main

if __name__ == "__main__":
    main()
