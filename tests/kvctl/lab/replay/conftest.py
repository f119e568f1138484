"""Puts the protocol tests' `simulation` within reach: recorded histories are made in it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "kvctl_agent" / "protocol"))
sys.path.insert(0, str(Path(__file__).parent))
