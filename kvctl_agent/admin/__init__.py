"""What operators see of an agent's components, and what they may have it do."""

from __future__ import annotations
