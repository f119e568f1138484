"""KV pools, staging memory and the copies between them. Imports numpy, never torch."""

from __future__ import annotations
