"""Device number of host memory, used by all layers and by both ends of a transfer."""

from __future__ import annotations

HOST = -1
"""Device number that stands for host memory."""
