"""The synthetic worker, one process per rank, and how ranks are planned, started, driven and stopped.

A worker has a real agent and a real pool; any decode rank can verify the content of its pool without the source.
"""

from __future__ import annotations
