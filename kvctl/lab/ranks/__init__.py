"""The synthetic worker: a real Agent with a real pool, and content that anyone can check without its source.

`kvctl bench` starts one process of it per rank; the messages between them are in `kvctl.lab.ranks.bench_messages`.
"""

from __future__ import annotations
