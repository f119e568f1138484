"""KV pools, staging memory, and the copies between them. The package imports numpy but never torch."""

from __future__ import annotations
