"""The synthetic worker, one process per rank, and how ranks are planned, started, driven and stopped.

A worker has a real Agent with a real pool, and content that any decode rank can verify without its source.
"""

from __future__ import annotations
