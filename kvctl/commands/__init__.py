"""Commands of `kvctl`, one module each: options, queries to the agents, and columns of the output."""

from __future__ import annotations
