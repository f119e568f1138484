"""Where memory is: numbers that every layer and both sides mean alike."""

from __future__ import annotations

HOST = -1
"""In place of a device's number: the host's memory."""
