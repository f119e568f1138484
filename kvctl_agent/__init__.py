"""The library embedded in each prefill and decode worker; importing it alone is light (no torch, no engine)."""

from __future__ import annotations
