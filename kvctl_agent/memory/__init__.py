"""KV pools, staging memory and the kernels that move rows between them; imports numpy, never torch."""

from __future__ import annotations
