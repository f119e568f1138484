"""Admin server of an agent: answers requests of operators' tools without slowing down transfers."""

from __future__ import annotations
