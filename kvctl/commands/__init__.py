"""Commands of `kvctl`, one module each: options, queries to the agents, and the view to print."""

from __future__ import annotations
