"""Finding agents, asking them all at once, and joining what they answer."""

from __future__ import annotations
