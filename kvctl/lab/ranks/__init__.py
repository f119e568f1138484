"""Synthetic workers, one process per rank, and the code that plans, starts, drives and stops them.

A worker has a real agent and a real KV pool, but no model. The content of the pool is a function of the room, so that a
decode rank verifies received bytes without a copy of the source.
"""

from __future__ import annotations
