"""The rank of a fleet that lives on: random rooms at any time, every byte compared, free pages watched."""

from __future__ import annotations
