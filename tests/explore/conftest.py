"""Puts the explorer, and the simulated world that it starts from, within reach of the tests here."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "kvctl_agent" / "protocol")]
